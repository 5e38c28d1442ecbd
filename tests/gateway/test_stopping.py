"""What ends before its time: cancellation, a group that has enough; through the chain."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from chain import polar_serve, until
from gateway_processes import left_behind, processes_with
from halves import topology
from peers.engine import ScriptedEngine
from peers.harness import scripted
from peers.receiver import receiving

HEARTBEAT = 60.0
"""so long that nothing which has to be quick can have come with a poll"""


def test_cancellation_reaches_a_process_that_will_not_end_at_once(
    engine: ScriptedEngine, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mark = "call-of-one-that-is-deaf"
    steps = scripted(("deaf", None), ("call", mark), ("daemon", 600), ("sleep", 600))
    file = topology(tmp_path / "topology.yaml", engine.url, HEARTBEAT)
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
    file = topology(tmp_path / "topology.yaml", engine.url, HEARTBEAT)
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
