"""Grading in a fresh sandbox: it comes up while the agent runs, has nothing of the agent's, is tried twice, and is gone
with its session however that ends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from chain import Chain, until
from gateway_processes import processes_with
from peers.harness import scripted
from sandboxing import needs_bubblewrap

pytestmark = needs_bubblewrap
PREPARED = [{"type": "upload_file", "content": "42", "target": "/session/artifacts/expected"}]
COMMAND = 'test -f "$ARTIFACTS_DIR/expected" && test ! -e "$ARTIFACTS_DIR/done"'


def graded(command: str = COMMAND) -> dict[str, Any]:
    return {"strategy": "command", "config": {"command": command}, "refresh_runtime": True}


def folders(chain: Chain, name: str) -> list[Path]:
    return sorted((chain.data / "gateway" / "sandboxes").glob(f"{name}-*"))


def test_it_is_ready_before_the_agent_has_ended(chain: Chain) -> None:
    mark = "agent-with-a-warm-sandbox"
    steps = scripted(("call", mark), ("write", "$ARTIFACTS_DIR/done"), ("sleep", 4), eval_prepare=PREPARED)
    assert chain.submit("warm", evaluator=graded(), **steps).status_code == 200
    until(lambda: any((folder / "session/artifacts/expected").exists() for folder in folders(chain, "warm")))
    assert processes_with(mark), "the agent runs"
    agent, fresh = folders(chain, "warm")
    assert "eval1" in fresh.name
    (result,) = chain.results("warm")
    assert result["metadata"]["termination"] == "done"
    assert result["trajectory"]["traces"][0]["reward"] == 1.0
    assert not agent.exists()
    assert not fresh.exists()


def test_one_that_does_not_come_up_is_made_anew(chain: Chain) -> None:
    steps = scripted(("call", "hello"), import_path="peers.broken:ColdStart", eval_prepare=PREPARED)
    (result,) = chain.run("cold", evaluator=graded(), **steps)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done")
    assert result["trajectory"]["traces"][0]["reward"] == 1.0
    assert folders(chain, "cold") == []


def test_one_that_never_comes_up_is_an_evaluation_fault(chain: Chain) -> None:
    failing = [{"type": "exec", "command": "echo no tests here >&2; exit 3"}]
    steps = scripted(("call", "hello"), eval_prepare=failing)
    (result,) = chain.run("never", evaluator=graded(), **steps)
    assert (result["status"], result["metadata"]["termination"]) == ("ERROR", "evaluation")
    assert "no tests here" in result["error"]
    assert (result["trajectory"]["status"], result["metadata"]["attempt"]) == ("COMPLETED", 1)
    assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [None]
    assert folders(chain, "never") == []


def test_one_that_hangs_costs_the_evaluations_budget(chain: Chain) -> None:
    hanging = [{"type": "exec", "command": "exec sleep 60050"}]
    steps = scripted(("call", "hello"), eval_prepare=hanging)
    (result,) = chain.run("hanging", evaluator=graded(), budgets={"evaluate": 1}, **steps)
    assert (result["status"], result["metadata"]["termination"]) == ("ERROR", "evaluation")
    assert "the budget of evaluate, 1 s, is spent" in result["error"]
    assert processes_with("sleep 60050") == []


def test_it_is_gone_with_a_session_that_is_cancelled_in_run(chain: Chain) -> None:
    hanging = [{"type": "exec", "command": "exec sleep 60051"}]
    steps = scripted(("call", "hello"), ("sleep", 600), eval_prepare=hanging)
    assert chain.submit("stopped", evaluator=graded(), **steps).status_code == 200
    until(lambda: processes_with("sleep 60051"))
    assert len(folders(chain, "stopped")) == 2
    chain.http.delete("/rollout/task/stopped").raise_for_status()
    (result,) = chain.results("stopped")
    assert result["metadata"]["termination"] == "cancelled"
    assert folders(chain, "stopped") == []
    assert processes_with("sleep 60051") == []


def test_it_is_gone_with_a_session_that_is_not_graded(chain: Chain) -> None:
    (result,) = chain.run("silent-afresh", evaluator=graded(), **scripted(("say", "nothing"), eval_prepare=PREPARED))
    assert result["metadata"]["termination"] == "no_calls"
    assert folders(chain, "silent-afresh") == []
