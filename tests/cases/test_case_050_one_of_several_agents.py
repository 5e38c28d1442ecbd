"""Case 50: one of the four agents of a harness raises. What then happens is decided: the session is `harness_exit`,
every agent's traces are kept and graded as one session of its group, and nothing of it is half there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bridge.making import group

from chain import polar_serve
from peers.engine import scripted_engine
from peers.harness import scripted
from peers.tokenizer import make_tokenizer
from polar.codec import from_json, to_json
from polar.records import TaskResult
from sandboxing import needs_bubblewrap
from slime_bridge.acceptance import Group, judge
from slime_bridge.adapter import ConversionRules

pytestmark = needs_bubblewrap


FOUR_AGENTS = {"agent 1 begins": 2, "agent 2 begins": 2, "agent 3 begins": 1, "agent 4 begins": 2}
"""the model's turns in each one's conversation"""


def check(result: dict[str, Any], index: int) -> None:
    facts = result["metadata"]
    assert (result["status"], facts["termination"], facts["exit_code"]) == ("COMPLETED", "harness_exit", 1)
    assert (facts["session_index"], facts["group_size"]) == (index, 2)
    assert "agent 3 is lost" in facts["harness_log"]
    traces = result["trajectory"]["traces"]
    turns = {trace["prompt_messages"][0]["content"]: roles(trace).count("assistant") for trace in traces}
    assert turns == FOUR_AGENTS
    assert [trace["reward"] for trace in traces] == [1.0] * 4
    tokens = result["trajectory"]["metadata"]["tokens"]
    assert tokens["sampled"] == tokens["trainable"]


def roles(trace: dict[str, Any]) -> list[str]:
    return [message["role"] for message in trace["response_messages"]]


def test_what_the_others_and_the_failed_agent_did_is_kept_and_graded(tmp_path: Path) -> None:
    with (
        scripted_engine(make_tokenizer(tmp_path), numbered=True) as engine,
        polar_serve(tmp_path / "data", engine.url) as chain,
    ):
        steps = scripted(("write", "$ARTIFACTS_DIR/done"), ("agents", 3))
        results = chain.run("four-agents", num_samples=2, **steps)
    for index, result in enumerate(results):
        check(result, index)
    document = {"task_id": "four-agents", "status": "completed", "results": results}
    whole = from_json(to_json(document), TaskResult)
    accepted = judge(whole, group(2), ConversionRules(), submitted=0, min_fraction=1.0)
    assert isinstance(accepted, Group)
    assert [len(session.samples) for session in accepted.sessions] == [4, 4]
    assert {sample.status.value for session in accepted.sessions for sample in session.samples} == {"completed"}
    assert accepted.trained == sum(result["trajectory"]["metadata"]["tokens"]["trainable"] for result in results)
