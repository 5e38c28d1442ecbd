"""Case 41: sandboxes leak on kill −9, on Ctrl-C, on a cancelled start."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from chain import until
from gateway_processes import left_behind, processes_with
from halves import ServerAlone, polar_gateway, polar_server
from peers.engine import ScriptedEngine
from sandboxing import needs_bubblewrap

LIVE = 50
NAP = f"sleep 60041.{os.getpid()}"
"""in the command line of every agent"""


@pytest.fixture
def topology(tmp_path: Path, engine: ScriptedEngine) -> Path:
    inference = {"engine": "sglang", "base_url": engine.url}
    node = {"id": "node-0", "port": 0, "inference": inference, "max_init_workers": 8, "max_run_workers": LIVE}
    file = tmp_path / "topology.yaml"
    file.write_text(json.dumps({"gateway": {"heartbeat_interval_seconds": 0.5, "nodes": [node]}}))
    return file


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerAlone]:
    with polar_server(tmp_path / "server") as made:
        yield made


def sleepers(server: ServerAlone, count: int) -> None:
    agent = {"harness": "shell", "custom_shell": {"command": f"exec {NAP}"}}
    server.submit("sleepers", num_samples=count, max_attempts=9, agent=agent, runtime={"memory_mb": 50})


def gone(data: Path, pid: int) -> bool:
    return not processes_with(NAP) and not left_behind(data, [pid])


@needs_bubblewrap
def test_a_killed_gateway_with_fifty_sandboxes_leaves_nothing_to_its_next_life(
    tmp_path: Path, topology: Path, engine: ScriptedEngine
) -> None:
    """The next life has no server, so that nothing new comes up meanwhile."""
    data = tmp_path / "gateway"
    with polar_server(tmp_path / "server") as server:
        with polar_gateway(data, server, topology) as first:
            sleepers(server, LIVE)
            until(lambda: len(processes_with(NAP)) == LIVE, 150)
            assert len(list((data / "sandboxes").iterdir())) == LIVE
            first.kill()
            first.wait(10)
        until(lambda: not processes_with(NAP), 30)
    with polar_gateway(data, server, topology):
        began = time.monotonic()
        until(lambda: gone(data, first.pid), 30)
        print(f"swept within {time.monotonic() - began:.1f} s of the start")
        until(lambda: len(list((data / "outbox").glob("*.result"))) == LIVE)


STANDING = [0, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 12))]
"""sandboxes that are up already"""


@needs_bubblewrap
@pytest.mark.parametrize("standing", STANDING)
def test_ctrl_c_while_sandboxes_come_up(tmp_path: Path, topology: Path, server: ServerAlone, standing: int) -> None:
    data = tmp_path / "gateway"
    with polar_gateway(data, server, topology) as gateway:
        sleepers(server, LIVE)
        until(lambda: coming_up(data) > standing, 60)
        gateway.send_signal(signal.SIGINT)
        assert gateway.wait(60) == 130
        assert left_behind(data, [gateway.pid]) == []
        assert processes_with(NAP) == []


@needs_bubblewrap
@pytest.mark.parametrize("standing", STANDING)
def test_a_task_cancelled_while_its_sandboxes_come_up(
    tmp_path: Path, topology: Path, server: ServerAlone, standing: int
) -> None:
    data = tmp_path / "gateway"
    with polar_gateway(data, server, topology) as gateway:
        sleepers(server, LIVE)
        until(lambda: coming_up(data) > standing, 60)
        server.http.delete("/rollout/task/sleepers").raise_for_status()
        until(lambda: server.status("sleepers")["status"] == "cancelled", 60)
        until(lambda: list((data / "sandboxes").iterdir()) == [] and not processes_with(NAP))
        assert gateway.poll() is None
        until(lambda: all("polar.runtimes.inside" in line for line in left_behind(data, [gateway.pid])))
        until(lambda: len(left_behind(data, [gateway.pid])) <= 1)  # the launcher


def coming_up(data: Path) -> int:
    folder = data / "sandboxes"
    return len(list(folder.iterdir())) if folder.is_dir() else 0
