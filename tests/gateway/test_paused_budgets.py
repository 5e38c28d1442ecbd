"""While inference is paused, no stage's budget runs: with a real pause, longer than what is left of the budget."""

from __future__ import annotations

import time
from typing import Any

import pytest

from chain import Chain, until
from peers.harness import scripted
from sandboxing import needs_bubblewrap

pytestmark = needs_bubblewrap
BUDGET, WORK, PAUSE = 5, 6.5, 4.0
"""seconds: the work takes longer than the budget, and less than budget and pause"""
DONE = ("write", "$ARTIFACTS_DIR/done")
NAP = f"sleep {WORK}"
STAGES: dict[str, tuple[dict[str, Any], str]] = {
    "init": (
        scripted(("call", "hello"), DONE, prepare=[{"type": "exec", "command": NAP}]) | {"budgets": {"init": BUDGET}},
        "INITIALIZING",
    ),
    "agent": (scripted(("sleep", WORK), ("call", "hello"), DONE) | {"budgets": {"agent": BUDGET}}, "RUNNING"),
    "evaluate": (
        scripted(("call", "hello"), DONE)
        | {"budgets": {"evaluate": BUDGET}, "evaluator": {"strategy": "command", "config": {"command": NAP}}},
        "EVALUATING",
    ),
}


@pytest.mark.parametrize("name", STAGES)
def test_a_pause_counts_against_nothing(chain: Chain, name: str) -> None:
    fields, stage = STAGES[name]
    task = f"paused-{name}"
    assert chain.submit(task, **fields).status_code == 200
    until(lambda: chain.stage(task) == [stage])
    chain.http.post("/rollout/inference/pause").raise_for_status()
    assert chain.http.get("/rollout/inference/status").json()["paused"]
    assert "the pause of inference" in chain.status(task)["waiting_for"]
    time.sleep(PAUSE)
    chain.http.post("/rollout/inference/resume").raise_for_status()
    (result,) = chain.results(task)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done"), result
    assert result["trajectory"]["traces"][0]["reward"] == 1.0
    field = {"init": "init_ms", "agent": "run_ms", "evaluate": "eval_ms"}[name]
    assert result["timing"][field] > 1000 * BUDGET


def test_without_a_pause_as_much_work_is_too_long(chain: Chain) -> None:
    (result,) = chain.run("not-paused", **scripted(("call", "hello"), ("sleep", WORK)), budgets={"agent": BUDGET})
    assert result["metadata"]["termination"] == "agent_timeout"
