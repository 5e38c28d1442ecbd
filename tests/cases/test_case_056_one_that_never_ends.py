"""Case 56: one stuck session of a group of 16 does not wedge the step: its group is replaced at the deadline, and the
same again after server and trainer were killed and started anew."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.bridge.conftest import Gateway
from tests.bridge.making import arguments
from tests.peers.node import Node, done
from tests.peers.trainer import Step, Trainer
from tests.server.conftest import Server, eventually

from polar.nodeapi import Lease, NodeResult
from polar.records import TaskState
from slime_bridge import rollout

SIZE, STUCK = 16, 3
DEADLINE = 3.0


def script(lease: Lease, node: Node) -> NodeResult | None:
    """One session of the second prompt's group never ends, whoever asks."""
    if lease.task["instruction"] == "p1" and lease.session_index == STUCK:
        return None
    return done(lease, node, reward=float(lease.session_index % 2))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    made = Server(tmp_path / "server")
    yield made
    made.kill()


@pytest.fixture
def gateway(server: Server) -> Iterator[Gateway]:
    made = Gateway(server, script)
    yield made
    made.stop()


@pytest.fixture
def settings(tmp_path: Path, server: Server) -> Iterator[dict[str, Any]]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"p{number}"}) + "\n" for number in range(20)))
    yield {
        "polar_rollout_url": server.url,
        "prompt_data": str(prompts),
        "save": str(tmp_path / "save"),
        "load": None,
        "n_samples_per_prompt": SIZE,
        "polar_straggler_deadline": DEADLINE,
    }
    rollout.close()


def running(server: Server) -> list[str]:
    tasks = server.http.get("/tasks", params={"limit": 1000}).json()["tasks"]
    return [task["task_id"] for task in tasks if not TaskState(task["status"]).terminal]


def check(step: Step, server: Server) -> None:
    assert [group[0][0].group_index for group in step.nest] == [0, 2]
    assert [len(group) for group in step.nest] == [SIZE, SIZE]
    assert step.metrics["polar/replaced_stragglers"] == 1
    assert step.metrics["polar/ledger/balanced"] == 1
    eventually(lambda: running(server) == [])


def test_its_group_is_replaced_at_the_deadline(server: Server, gateway: Gateway, settings: dict[str, Any]) -> None:
    check(Trainer(arguments(**settings)).rollout(0), server)
    (given_up,) = [task for task in gateway.tasks() if task["instruction"] == "p1"]
    assert server.task(given_up["task_id"])["status"] == "cancelled"
    ended = server.task(given_up["task_id"])["results"]
    named = [result["metadata"]["termination"] for result in ended]
    assert sorted(named) == ["cancelled"] + ["done"] * (SIZE - 1)


def test_the_same_after_server_and_trainer_were_killed(
    server: Server, gateway: Gateway, settings: dict[str, Any]
) -> None:
    """The first trainer has no deadline: it is killed while it waits for the stuck one."""
    forever = settings | {"polar_straggler_deadline": None}
    command = [sys.executable, "-m", "tests.bridge.dying_trainer", json.dumps(forever)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as waiting:
        eventually(lambda: len(gateway.leases) == 2 * SIZE, 60)
        left = eventually(lambda: len(running(server)) == 1 and running(server))
        server.kill()
        waiting.kill()
    server.start()
    assert running(server) == left
    check(Trainer(arguments(**settings)).rollout(0), server)
    assert server.task(left[0])["status"] == "cancelled"
