"""Case 49: a first attempt that ends after the second was accepted, a callback that comes twice, and one that comes
before the reply to its submission: exactly one result is taken, and the others are on record."""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from typing import Any

import httpx
import pytest
from tests.bridge.conftest import Gateway, gateway, house, make_trainer, relay, server
from tests.peers.receiver import receiving
from tests.peers.relay import Relay
from tests.peers.trainer import Trainer
from tests.server.conftest import Server, eventually, make_server

from slime_bridge.slime_types import trajectory_of

__all__ = ["gateway", "house", "make_server", "make_trainer", "relay", "server"]
SUBMIT = "/rollout/task/submit"


def rows(server: Server, sql: str) -> list[tuple[Any, ...]]:
    with closing(sqlite3.connect(f"file:{server.folder}/polar.db?mode=ro", uri=True, timeout=20)) as database:
        return database.execute(sql).fetchall()


def test_the_first_attempt_ends_when_the_second_has_won(make_server: Callable[..., Server]) -> None:
    server = make_server(lease_seconds=1.0)
    slow, quick = server.node("slow"), server.node("quick")
    with receiving(500) as receiver:
        server.submit("requeued", callback_url=receiver.url)
        (first,) = slow.lease()
        (second,) = quick.lease()
        assert (second.session_id, second.attempt) == (first.session_id, 2)
        assert quick.finish(second, reward=1.0).accepted
        for _ in range(2):
            late = slow.finish(first, reward=0.0)
            assert (late.accepted, late.winner) == (False, 2)
        assert (quick.finish(second, reward=0.5).accepted, slow.poll().cancels) == (True, [])
        eventually(lambda: len(receiver.bodies) == 2)
    assert len(set(receiver.bodies)) == len(set(receiver.deliveries)) == 1
    (result,) = server.task("requeued")["results"]
    assert result["metadata"]["attempt"] == 2
    assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [1.0]
    assert rows(server, "SELECT number, state FROM attempts ORDER BY number") == [(1, "late"), (2, "won")]
    path = f"/tasks/requeued/sessions/{first.session_id}/log"
    for attempt in (1, 2):
        assert server.http.get(path, params={"attempt": attempt}).content.endswith(f".{attempt}".encode())


def test_the_callback_comes_before_the_reply_to_the_submission(
    server: Server, gateway: Gateway, make_trainer: Callable[..., Trainer], relay: Relay
) -> None:
    held: list[int] = []

    def hold(path: str, number: int) -> bool:
        """Answers only when the callback of each task submitted so far has been acknowledged; the first submission is
        the bridge's probe."""
        if path == SUBMIT and number > 0:
            held.append(number)
            eventually(lambda: rows(server, "SELECT count(*) FROM deliveries WHERE state != 'delivered'") == [(0,)])
            eventually(lambda: rows(server, "SELECT count(*) FROM deliveries")[0][0] > number)
        return False

    relay.lose_answer = hold
    step = make_trainer(polar_rollout_url=relay.url).rollout(0)
    assert len(held) == 2
    assert [trajectory_of(sample) for sample in step.samples] == [0, 1, 2, 3]
    assert step.metrics["polar/ledger/groups/arrived"] == 2
    assert step.metrics["polar/ledger/balanced"] == 1


def test_a_callback_that_comes_again_is_logged_and_trains_nothing(
    server: Server, gateway: Gateway, make_trainer: Callable[..., Trainer], caplog: pytest.LogCaptureFixture
) -> None:
    trainer = make_trainer()
    first = trainer.rollout(0)
    task = gateway.tasks()[0]
    whole = server.task(task["task_id"])
    document = {name: whole[name] for name in ("task_id", "status", "results")}
    with caplog.at_level(logging.INFO, "slime_bridge"):
        for _ in range(2):
            assert httpx.post(task["callback_url"], json=document).json() == {"ok": True}
    assert caplog.text.count(f"callback of the task {task['task_id']}, which nobody waits for") == 2
    second = trainer.rollout(1)
    seen = [trajectory_of(sample) for step in (first, second) for sample in step.samples]
    assert seen == list(range(8))
    assert second.metrics["polar/ledger/groups/arrived"] == 4
