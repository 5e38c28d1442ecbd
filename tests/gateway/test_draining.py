"""A gateway that goes while its server stays: drained, started anew, started while inference is paused."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chain import Chain, polar_serve, until
from halves import ENVIRONMENT, polar_gateway, polar_server, topology
from peers.engine import ScriptedEngine, scripted_engine
from peers.harness import scripted
from peers.tokenizer import make_tokenizer

STEPS = scripted(("call", "hello"), ("write", "$ARTIFACTS_DIR/done"))
BEAT = 0.5
LONG = 90.0


def calls(engine: ScriptedEngine) -> int:
    """Model calls alone: a probe has a prompt of one token."""
    return sum(len(request["input_ids"]) > 1 for request in engine.requests)


def test_drained_gateway_finishes_what_it_has_and_takes_work_again_when_it_starts_anew(
    engine: ScriptedEngine, tmp_path: Path
) -> None:
    file = topology(tmp_path / "topology.yaml", engine.url, BEAT)
    with polar_server(tmp_path / "server") as server:
        with polar_gateway(tmp_path / "gateway", server, file):
            until(lambda: server.node().get("healthy"), LONG)
            engine.script({"text": "slow", "hold": True})
            before = calls(engine)
            server.submit("running", **STEPS)
            until(lambda: calls(engine) > before, LONG)
            assert server.http.delete("/nodes/node-0").json()["draining"]
            server.submit("waiting", **STEPS)
            assert server.status("waiting")["waiting_for"] == "a gateway: node-0 drained"
            command = [sys.executable, "-m", "polar", "status", "--server", server.url]
            shown = subprocess.run(command, capture_output=True, text=True, env=ENVIRONMENT)
            assert "draining" in shown.stdout, shown.stderr
            engine.release()
            until(lambda: server.status("running")["status"] == "completed", LONG)
            assert server.status("waiting")["completed_sessions"] == 0
        with polar_gateway(tmp_path / "gateway", server, file):
            until(lambda: server.status("waiting")["status"] == "completed", LONG)
            assert not server.node()["draining"]


def test_gateway_that_starts_while_inference_is_paused_begins_paused(tmp_path: Path) -> None:
    """Its engine comes later still: the pause is there before the proxy is."""
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        port = reserved.getsockname()[1]
    file = topology(tmp_path / "topology.yaml", f"http://127.0.0.1:{port}", BEAT)
    pause = {"timeout_seconds": 600}
    with polar_server(tmp_path / "server") as server:
        server.http.post("/rollout/inference/pause", params=pause).raise_for_status()
        with polar_gateway(tmp_path / "gateway", server, file):
            until(lambda: server.http.get("/health").json()["nodes"] == 1, LONG)
            until(lambda: server.http.get("/rollout/inference/status").json()["paused"])
            with scripted_engine(make_tokenizer(tmp_path), port=port) as engine:
                until(lambda: server.node()["healthy"], LONG)
                server.submit("task", **STEPS)
                until(lambda: server.node()["metrics"]["run_inflight"] == 1, LONG)
                time.sleep(2 * BEAT)
                assert calls(engine) == 0
                server.http.post("/rollout/inference/resume")
                until(lambda: server.status("task")["status"] == "completed", LONG)


def test_pause_of_one_who_is_gone_ends_by_itself_and_counts_against_no_budget(
    engine: ScriptedEngine, chain: Chain
) -> None:
    assert chain.http.post("/rollout/inference/pause", params={"timeout_seconds": 6}).json()["paused"]
    paused_at = time.monotonic()
    (result,) = chain.run("patient", budgets={"agent": 5}, **STEPS)
    assert time.monotonic() - paused_at > 5.5
    assert result["metadata"]["termination"] == "done"
    assert not chain.http.get("/rollout/inference/status").json()["paused"]


@pytest.mark.slow
def test_while_inference_is_paused_the_engine_is_not_even_probed(tmp_path: Path) -> None:
    """Its memory may be the trainer's. A gateway that has lost its engine asks for it every second, but not then."""
    tokenizer = make_tokenizer(tmp_path)
    with contextlib.ExitStack() as first:
        engine = first.enter_context(scripted_engine(tokenizer))
        port = int(engine.url.rpartition(":")[2])
        with polar_serve(tmp_path / "data", engine.url) as chain:
            first.close()
            chain.run("finds-out", max_attempts=1, **STEPS)
            until(lambda: not chain.http.get("/nodes").json()["nodes"][0]["healthy"], LONG)
            assert chain.http.post("/rollout/inference/pause", params={"timeout_seconds": 600}).json()["paused"]
            with scripted_engine(tokenizer, port=port) as engine:
                time.sleep(4 * BEAT)
                assert engine.requests == []
                chain.http.post("/rollout/inference/resume").raise_for_status()
                until(lambda: chain.http.get("/nodes").json()["nodes"][0]["healthy"], LONG)
                assert engine.requests
