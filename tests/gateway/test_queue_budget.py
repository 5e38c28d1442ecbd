"""Waiting for a run slot with the sandbox up is waiting in the queue."""

from __future__ import annotations

from pathlib import Path

from chain import polar_serve, until
from peers.engine import ScriptedEngine
from peers.harness import scripted


def test_a_session_without_a_run_slot_in_its_queue_budget_ends_so(engine: ScriptedEngine, tmp_path: Path) -> None:
    with polar_serve(tmp_path / "data", engine.url, "--run-workers=1", "--init-workers=2") as chain:
        assert chain.submit("long", **scripted(("call", "hello"), ("sleep", 600))).status_code == 200
        until(lambda: chain.stage("long") == ["RUNNING"], 60)
        assert chain.submit("waits", budgets={"queue": 5}, **scripted(("call", "hello"))).status_code == 200
        until(lambda: chain.stage("waits") == ["READY"], 60)
        result = chain.results("waits")[0]
        assert (result["status"], result["metadata"]["termination"]) == ("TIMEOUT", "queue")
        assert "run slot" in result["error"]
        assert result["trajectory"] is None
        assert result["metadata"]["attempt"] == 1
        assert chain.status("waits")["status"] == "failed"
        assert not list((chain.data / "gateway" / "sandboxes").glob("waits-*"))
        assert chain.stage("long") == ["RUNNING"]
