"""What ends before its time: cancellation, a group that has enough, a gateway that is drained; through the chain."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from chain import polar_serve, until
from gateway_processes import left_behind, processes_with
from peers.engine import ScriptedEngine
from peers.harness import scripted
from peers.receiver import receiving
from polar.config import TOKEN_VARIABLE

HEARTBEAT = 60.0
"""so long that nothing which has to be quick can have come with a poll"""


def topology(path: Path, engine: ScriptedEngine, heartbeat: float) -> Path:
    node = {"id": "node-0", "port": 0, "inference": {"engine": "sglang", "base_url": engine.url}, "max_run_workers": 4}
    path.write_text(yaml.safe_dump({"gateway": {"heartbeat_interval_seconds": heartbeat, "nodes": [node]}}))
    return path


def test_cancellation_reaches_a_process_that_will_not_end_at_once(
    engine: ScriptedEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = "call-of-one-that-is-deaf"
    steps = scripted(("deaf", None), ("call", mark), ("daemon", 600), ("sleep", 600))
    file = topology(tmp_path / "topology.yaml", engine, HEARTBEAT)
    with polar_serve(tmp_path / "data", engine.url, "--topology", str(file)) as chain:
        chain.submit("deaf", **steps)
        until(lambda: len(processes_with(mark)) >= 2)
        asked = time.monotonic()
        assert chain.http.delete("/rollout/task/deaf").json()["status"] in ("cancelling", "cancelled")
        until(lambda: not processes_with(mark), HEARTBEAT / 3)
        gone = time.monotonic() - asked
        (result,) = chain.results("deaf", seconds=HEARTBEAT / 3)
        assert (result["status"], result["metadata"]["termination"]) == ("ERROR", "cancelled")
        assert left_behind(tmp_path / "data" / "gateway", []) == []
    with capsys.disabled():
        print(f"\nfrom DELETE to the last process gone: {gone:.2f} s")


def test_group_with_enough_usable_sessions_ends_its_others(engine: ScriptedEngine, tmp_path: Path) -> None:
    mark = "call-of-the-early-group"
    steps = scripted(("call", mark), ("sleep_unless_first", 2), ("write", "$ARTIFACTS_DIR/done"))
    file = topology(tmp_path / "topology.yaml", engine, HEARTBEAT)
    with receiving() as receiver, polar_serve(tmp_path / "data", engine.url, "--topology", str(file)) as chain:
        group = {"num_samples": 4, "early_stop_min_usable_sessions": 2, "callback_url": receiver.url}
        results = chain.run("early", **group, **steps, seconds=HEARTBEAT / 2)
        named = [result["metadata"]["termination"] for result in results]
        assert named == ["done", "done", "early_stop", "early_stop"]
        assert [result["trajectory"] is not None for result in results] == [True, True, False, False]
        until(lambda: not processes_with(mark))
        until(lambda: len(receiver.bodies) == 1)
        assert json.loads(receiver.bodies[0])["status"] == "completed"
        assert chain.run("next", **scripted(("call", "x"), ("write", "$ARTIFACTS_DIR/done")))
        assert len(receiver.bodies) == 1


# Draining one gateway of a server that stays


@contextmanager
def polar(folder: Path, *command: str) -> Iterator[dict[str, Any]]:
    """A `polar` command that goes on until the block ends; yields what it says when it is ready."""
    errors = folder.with_name(folder.name + ".err")
    environment = os.environ | {TOKEN_VARIABLE: "token-of-the-test"}
    argv = [sys.executable, "-m", "polar", *command, "--data", str(folder), "--json"]
    with errors.open("w") as stderr:
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"{command} did not come up: {errors.read_text()}"
        yield json.loads(line)
    finally:
        process.terminate()
        process.wait(30)


def test_drained_gateway_finishes_what_it_has_and_takes_work_again_when_it_starts_anew(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = topology(tmp_path / "topology.yaml", engine, 0.5)
    steps = scripted(("call", "hello"), ("write", "$ARTIFACTS_DIR/done"))
    task = {"instruction": "do it", "evaluator": {"strategy": "session_completed"}} | steps
    with ExitStack() as stack:
        url = stack.enter_context(polar(tmp_path / "server", "server", "--port", "0"))["url"]
        http = httpx.Client(
            base_url=url, timeout=30, trust_env=False, headers={"X-Polar-Control-Token": "token-of-the-test"}
        )
        status = ended(http)
        gateway = ("gateway", "--topology", str(file), "--server", url)
        with polar(tmp_path / "gateway", *gateway):
            engine.script({"text": "slow", "hold": True})
            asked = len(engine.requests)
            http.post("/rollout/task/submit", json={"task_id": "running"} | task).raise_for_status()
            until(lambda: len(engine.requests) > asked)
            assert http.delete("/nodes/node-0").json()["draining"]
            http.post("/rollout/task/submit", json={"task_id": "waiting"} | task).raise_for_status()
            assert status("waiting")["waiting_for"] == "a gateway: node-0 drained"
            shown = subprocess.run(
                [sys.executable, "-m", "polar", "status", "--server", url],
                capture_output=True,
                text=True,
                env=os.environ | {TOKEN_VARIABLE: "token-of-the-test"},
            )
            assert "draining" in shown.stdout, shown.stderr
            engine.release()
            until(lambda: status("running")["status"] == "completed")
            assert status("waiting")["completed_sessions"] == 0
        with polar(tmp_path / "gateway", *gateway):
            until(lambda: status("waiting")["status"] == "completed")
            assert not http.get("/nodes/node-0").json()["draining"]


def ended(http: httpx.Client) -> Callable[[str], dict[str, Any]]:
    return lambda task_id: http.get(f"/rollout/task/{task_id}", params={"results": "false"}).json()
