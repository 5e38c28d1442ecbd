"""The table of endings, row by row, each with a real harness process in a real sandbox."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from chain import Chain, polar_serve, until
from peers.engine import ScriptedEngine
from peers.harness import scripted
from polar.sessionlog import parse, unpack

DONE = ("write", "$ARTIFACTS_DIR/done")


def check(result: dict[str, Any], status: str, termination: str, *, reward: float | None, traces: int) -> None:
    trajectory = result["trajectory"]
    assert (result["status"], result["metadata"]["termination"]) == (status, termination), result
    assert len(trajectory["traces"] if trajectory else []) == traces
    assert [trace["reward"] for trace in (trajectory["traces"] if trajectory else [])] == [reward] * traces
    if trajectory:
        tokens = trajectory["metadata"]["tokens"]
        assert tokens["sampled"] == tokens["trainable"] + sum(tokens["excluded"].values())


def only(results: list[dict[str, Any]]) -> dict[str, Any]:
    assert len(results) == 1
    return results[0]


def test_done(chain: Chain) -> None:
    result = only(chain.run("done", **scripted(("call", "hello"), ("call", "go on"), DONE)))
    check(result, "COMPLETED", "done", reward=1.0, traces=1)
    assert result["trajectory"]["metadata"]["calls"]["continued"] == 1
    assert result["error"] is None
    assert result["metadata"]["attempt"] == 1


def test_done_without_evaluator(chain: Chain) -> None:
    result = only(chain.run("plain", evaluator=None, **scripted(("call", "hello"))))
    check(result, "COMPLETED", "done", reward=None, traces=1)


def test_harness_exit(chain: Chain) -> None:
    result = only(chain.run("exit", **scripted(("call", "hello"), ("exit", 3))))
    check(result, "COMPLETED", "harness_exit", reward=0.0, traces=1)
    assert result["metadata"]["exit_code"] == 3


def test_no_calls_is_no_success(chain: Chain) -> None:
    result = only(chain.run("silent", **scripted(DONE)))
    check(result, "ERROR", "no_calls", reward=None, traces=0)
    assert "exit code 0" in result["error"]


def test_harness_that_makes_no_calls_by_its_own_word_is_graded(chain: Chain) -> None:
    fields = scripted() | {"agent": {"import_path": "peers.broken:Oracle"}}
    result = only(chain.run("oracle", **fields))
    check(result, "COMPLETED", "done", reward=None, traces=0)
    assert result["trajectory"]["metadata"]["evaluation"]["outcome_reward"] == 1.0


def test_agent_timeout_is_built_and_graded(chain: Chain) -> None:
    steps = scripted(DONE, ("call", "hello"), ("sleep", 600))
    result = only(chain.run("slow", timeout_seconds=5, **steps))
    check(result, "TIMEOUT", "agent_timeout", reward=1.0, traces=1)
    assert result["trajectory"]["status"] == "TIMEOUT"
    assert result["trajectory"]["traces"][-1]["finish_reason"] == "stop"


def test_what_was_sampled_before_the_first_answer_was_whole_is_named(chain: Chain, engine: ScriptedEngine) -> None:
    """It reached the engine, so it is no session without a call; and nobody knows a killed harness's exit code."""
    engine.script({"text": "one two three four", "hold": True, "after": 3})
    result = only(chain.run("first", timeout_seconds=5, **scripted(DONE, ("stream", "hello"))))
    check(result, "TIMEOUT", "agent_timeout", reward=None, traces=0)
    ledger = result["trajectory"]["metadata"]["tokens"]
    assert (ledger["sampled"], ledger["trainable"], ledger["excluded"]) == (3, 0, {"aborted": 3})
    assert "exit_code" not in result["metadata"]
    assert result["error"] is None


def test_a_session_all_of_whose_calls_are_refused_says_so(chain: Chain) -> None:
    result = only(chain.run("refused", **scripted(("call", "x " * 5000), DONE)))
    check(result, "ERROR", "no_calls", reward=None, traces=0)
    assert "no model call reached the engine; the last was refused: prompt is too long" in result["error"]


def test_turn_limit(chain: Chain) -> None:
    steps = scripted(("call", "one"), ("call", "two"), DONE)
    result = only(chain.run("limit", limits={"turns": 1}, **steps))
    check(result, "COMPLETED", "limit", reward=1.0, traces=1)
    assert result["trajectory"]["traces"][-1]["finish_reason"] == "length"


def test_token_limit(chain: Chain, engine: ScriptedEngine) -> None:
    engine.script({"ids": [70] * 30}, {"ids": [71] * 30})
    steps = scripted(("call", "one"), ("call", "two"), ("call", "three"), DONE)
    result = only(chain.run("tokens", limits={"tokens": 40}, **steps))
    check(result, "COMPLETED", "limit", reward=1.0, traces=1)
    assert result["trajectory"]["metadata"]["tokens"]["trainable"] == 40
    assert result["trajectory"]["traces"][-1]["finish_reason"] == "length"


def test_limit_of_cost(tmp_path: Path, engine: ScriptedEngine) -> None:
    """The node's prices stand in its topology."""
    node = {"inference": {"engine": "sglang", "base_url": engine.url}, "prices": {"input": 0, "output": 1e6}}
    file = tmp_path / "topology.yaml"
    file.write_text(json.dumps({"gateway": {"nodes": [node]}}))
    steps = scripted(("call", "one"), ("call", "two"), DONE)
    with polar_serve(tmp_path / "data", engine.url, "--topology", str(file)) as chain:
        result = only(chain.run("cost", limits={"cost": 2.5}, **steps))
    check(result, "COMPLETED", "limit", reward=1.0, traces=1)


def test_a_limit_that_no_node_can_keep_is_the_tasks_fault(chain: Chain) -> None:
    result = only(chain.run("unpriced", limits={"cost": 2.5}, **scripted(("call", "one"))))
    check(result, "ERROR", "prepare", reward=None, traces=0)
    assert "prices" in result["error"]


def test_limit_of_seconds(chain: Chain) -> None:
    steps = scripted(("call", "one"), ("sleep", 2), ("call", "two"), DONE)
    result = only(chain.run("seconds", limits={"seconds": 1}, **steps))
    check(result, "COMPLETED", "limit", reward=1.0, traces=1)


def test_context_overflow_is_no_infrastructure_fault(chain: Chain) -> None:
    steps = scripted(("call", "one"), ("call", "x " * 5000), DONE)
    result = only(chain.run("context", **steps))
    check(result, "COMPLETED", "context", reward=1.0, traces=1)
    assert result["trajectory"]["traces"][-1]["finish_reason"] == "length"


def test_a_harness_that_shortens_its_history_after_an_overflow_is_done(chain: Chain) -> None:
    steps = scripted(("call", "x " * 5000), ("forget", 1), ("call", "shorter"), DONE)
    result = only(chain.run("recovered", **steps))
    check(result, "COMPLETED", "done", reward=1.0, traces=1)
    assert result["trajectory"]["metadata"]["calls"]["refused"] == 1


def test_a_working_directory_that_is_not_there_is_told(chain: Chain) -> None:
    fields = scripted(("call", "hello"))
    fields["agent"]["custom_shell"]["cwd"] = "/no/such/folder"
    result = only(chain.run("nowhere", **fields))
    check(result, "ERROR", "no_calls", reward=None, traces=0)
    assert "/no/such/folder" in result["error"]


def test_prepare_is_the_tasks_fault(chain: Chain) -> None:
    failing = [{"type": "exec", "command": "echo no such thing >&2; exit 4"}]
    result = only(chain.run("prepare", **scripted(("call", "hello"), prepare=failing)))
    check(result, "ERROR", "prepare", reward=None, traces=0)
    assert "no such thing" in result["error"]
    assert result["metadata"]["attempt"] == 1


def test_sandbox_that_does_not_come_up_is_tried_again(chain: Chain) -> None:
    steps = scripted(("call", "hello"))
    steps["runtime"]["kwargs"] = {"bind": ["/no/such/folder"]}
    result = only(chain.run("nosandbox", **steps))
    check(result, "ERROR", "sandbox_start", reward=None, traces=0)
    assert result["metadata"]["attempt"] == 2
    assert "/no/such/folder" in result["error"]


def test_sandbox_lost_in_every_attempt(chain: Chain) -> None:
    assert chain.submit("lost", **scripted(("call", "hello"), ("sleep", 600))).status_code == 200
    for attempt in (1, 2):
        pid = server_pid(chain, f"lost-*.{attempt}")
        until(lambda: chain.stage("lost") == ["RUNNING"])
        os.kill(pid, signal.SIGKILL)
    result = only(chain.results("lost"))
    check(result, "ERROR", "sandbox_lost", reward=None, traces=0)
    assert result["metadata"]["attempt"] == 2


def server_pid(chain: Chain, sandbox: str) -> int:
    """Of the process that serves the sandbox, once it is there."""
    root = chain.data / "gateway" / "sandboxes"
    until(lambda: any((folder / "server.pid").exists() for folder in root.glob(sandbox)))
    (folder,) = root.glob(sandbox)
    return int((folder / "server.pid").read_text().split()[0])


def test_runtime_that_complains_when_it_is_stopped_costs_nothing(chain: Chain) -> None:
    fields = scripted(("call", "hello"), DONE, import_path="peers.broken:BadStop")
    check(only(chain.run("badstop", **fields)), "COMPLETED", "done", reward=1.0, traces=1)


def test_engine_that_lies_in_every_attempt(chain: Chain, engine: ScriptedEngine) -> None:
    engine.script({"text": "no ids", "fault": "no_ids"})
    result = only(chain.run("lies", max_attempts=1, **scripted(("call", "hello"), DONE)))
    check(result, "ERROR", "engine_lies", reward=None, traces=0)


def test_harness_that_ends_well_after_an_engine_fault_is_no_success(chain: Chain, engine: ScriptedEngine) -> None:
    """Whatever its exit code."""
    engine.script({"text": "fine"}, {"text": "no ids", "fault": "no_ids"})
    steps = scripted(("call", "hello"), ("call", "again"), DONE, ("exit", 0))
    result = only(chain.run("lies-later", max_attempts=1, **steps))
    check(result, "ERROR", "engine_lies", reward=None, traces=0)
    assert result["metadata"]["exit_code"] == 0


@pytest.mark.slow
def test_engine_fault_is_retried_and_named(chain: Chain, engine: ScriptedEngine) -> None:
    """The probe lifts the doubt in between; the second attempt meets a sound engine."""
    engine.script(*[{"fault": "500"}] * 6)
    result = only(chain.run("engine", seconds=120, **scripted(("call", "hello"), DONE)))
    check(result, "COMPLETED", "done", reward=1.0, traces=1)
    assert result["metadata"]["attempt"] == 2


def test_evaluation_failure_keeps_the_trajectory(chain: Chain) -> None:
    evaluator = {"strategy": "command", "config": {"command": "true", "reward_file": "/session/none"}}
    result = only(chain.run("ungraded", evaluator=evaluator, **scripted(("call", "hello"))))
    check(result, "ERROR", "evaluation", reward=None, traces=1)
    assert result["trajectory"]["status"] == "COMPLETED"


def test_evaluator_that_never_ends_has_its_own_budget(chain: Chain) -> None:
    evaluator = {"strategy": "command", "config": {"command": "trap '' TERM; while :; do sleep 1; done"}}
    result = only(chain.run("hung", evaluator=evaluator, budgets={"evaluate": 1}, **scripted(("call", "hello"))))
    check(result, "ERROR", "evaluation", reward=None, traces=1)


def test_memory_limit(chain: Chain) -> None:
    result = only(chain.run("oom", **scripted(("call", "hello"), ("eat", 4000), memory_mb=200)))
    assert result["status"] == "COMPLETED"
    # Without a writable cgroup the limit is an rlimit: the program meets a MemoryError, and exits by itself.
    assert result["metadata"]["termination"] in ("sandbox_limit", "harness_exit")
    assert "ate" not in result["metadata"]["harness_log"]
    assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [0.0]


def test_queue_budget(chain: Chain) -> None:
    blockers = scripted(("call", "hello"), ("sleep", 600))
    assert chain.submit("blocker", num_samples=40, **blockers).status_code == 200
    result = only(chain.run("queued", budgets={"queue": 1}, **scripted(("call", "hello"))))
    check(result, "TIMEOUT", "queue", reward=None, traces=0)
    assert chain.status("queued")["status"] == "failed"
    assert chain.http.delete("/rollout/task/blocker").status_code == 200
    until(lambda: chain.status("blocker")["status"] == "cancelled")


def test_cancelled(chain: Chain) -> None:
    assert chain.submit("cancelled", **scripted(("call", "hello"), ("sleep", 600))).status_code == 200
    until(lambda: chain.stage("cancelled") == ["RUNNING"])
    chain.http.delete("/rollout/task/cancelled")
    result = only(chain.results("cancelled"))
    check(result, "ERROR", "cancelled", reward=None, traces=0)


def test_cancelled_while_the_sandbox_is_prepared(chain: Chain) -> None:
    slow = [{"type": "exec", "command": "sleep 600"}]
    assert chain.submit("cancelled-init", **scripted(("call", "hello"), prepare=slow)).status_code == 200
    until(lambda: chain.stage("cancelled-init") == ["INITIALIZING"])
    check_cancelled(chain, "cancelled-init")


def test_cancelled_while_it_waits_for_a_slot(chain: Chain) -> None:
    """Four run at once; the fifth is READY."""
    steps = scripted(("call", "hello"), ("sleep", 600))
    assert chain.submit("running", num_samples=4, **steps).status_code == 200
    until(lambda: chain.stage("running") == ["RUNNING"] * 4)
    assert chain.submit("cancelled-ready", **steps).status_code == 200
    until(lambda: chain.stage("cancelled-ready") == ["READY"])
    check_cancelled(chain, "cancelled-ready")
    chain.http.delete("/rollout/task/running")
    until(lambda: chain.status("running")["status"] == "cancelled")


@pytest.mark.parametrize("refresh", [False, True])
def test_cancelled_while_it_is_graded(chain: Chain, refresh: bool) -> None:
    name = f"cancelled-eval-{refresh}"
    evaluator = {"strategy": "command", "config": {"command": "sleep 600"}, "refresh_runtime": refresh}
    assert chain.submit(name, evaluator=evaluator, **scripted(("call", "hello"))).status_code == 200
    until(lambda: chain.stage(name) == ["EVALUATING"])
    check_cancelled(chain, name)


def test_cancelled_after_its_end_it_keeps_its_end(chain: Chain) -> None:
    steps = scripted(("call", "hello"), DONE, import_path="peers.broken:SlowStop")
    assert chain.submit("cancelled-late", **steps).status_code == 200
    until(lambda: list((chain.data / "gateway" / "sandboxes").glob("cancelled-late-*.going")))
    chain.http.delete("/rollout/task/cancelled-late").raise_for_status()
    check(only(chain.results("cancelled-late")), "COMPLETED", "done", reward=1.0, traces=1)
    assert chain.status("cancelled-late")["status"] == "cancelled"


def check_cancelled(chain: Chain, name: str) -> None:
    chain.http.delete(f"/rollout/task/{name}").raise_for_status()
    check(only(chain.results(name)), "ERROR", "cancelled", reward=None, traces=0)
    root = chain.data / "gateway" / "sandboxes"
    assert list(root.glob(f"{name}-*")) == []


def test_early_stop(chain: Chain) -> None:
    """Two sessions end by themselves, which is enough; those that would sleep on are stopped."""
    steps = scripted(("call", "hello"), DONE, ("sleep_unless_first", 2))
    results = chain.run("early", num_samples=4, early_stop_min_usable_sessions=2, **steps)
    named = sorted(result["metadata"]["termination"] for result in results)
    assert named == ["done", "done", "early_stop", "early_stop"]


def test_build_failure_keeps_the_log(chain: Chain) -> None:
    builder = {"strategy": "peers.broken:Broken"}
    result = only(chain.run("unbuilt", builder=builder, **scripted(("call", "hello"))))
    check(result, "ERROR", "build", reward=None, traces=0)
    assert "a bug of the builder's" in result["error"]
    log = chain.http.get(f"/tasks/unbuilt/sessions/{result['session_id']}/log")
    assert len(parse(unpack(log.content)).calls) == 1


def test_builder_whose_ledger_does_not_balance(chain: Chain) -> None:
    result = only(
        chain.run("unbalanced", builder={"strategy": "peers.broken:Unbalanced"}, **scripted(("call", "hello")))
    )
    check(result, "ERROR", "build", reward=None, traces=0)
    assert "does not balance" in result["error"]


def test_evaluator_bug_is_no_reward(chain: Chain) -> None:
    evaluator = {"strategy": "peers.broken:Broken"}
    result = only(chain.run("misgraded", evaluator=evaluator, **scripted(("call", "hello"))))
    check(result, "ERROR", "evaluation", reward=None, traces=1)
    assert "a bug of the evaluator's" in result["error"]


def test_harness_bug_is_prepare(chain: Chain) -> None:
    fields = scripted(("call", "hello")) | {"agent": {"import_path": "peers.broken:Broken"}}
    result = only(chain.run("misharnessed", **fields))
    check(result, "ERROR", "prepare", reward=None, traces=0)
    assert "a bug of the harness's" in result["error"]
