"""A callback arrives at once, and again until it is acknowledged, whatever becomes of the receiver or of the server."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing

import msgspec
import numpy as np
import pytest
from tests.peers.node import Node, done, fault
from tests.peers.receiver import Receiver, callback_url, nobody, receiving
from tests.server.conftest import Server, eventually

from polar.codec import from_msgpack
from polar.nodeapi import Lease
from polar.records import SessionStatus, TaskResult, TaskState, Termination, Trace


def finish(server: Server, node: Node, task_id: str, **fields: object) -> None:
    server.submit(task_id, **fields)
    node.finish(node.lease()[0])


def states(server: Server) -> dict[str, str]:
    """What is on record of each task's callback."""
    with closing(sqlite3.connect(f"file:{server.folder / 'polar.db'}?mode=ro", uri=True)) as db:
        return dict(db.execute("SELECT task_id, state FROM deliveries").fetchall())


def problems(server: Server) -> list[str | None]:
    """What was wrong with each callback's last try."""
    with closing(sqlite3.connect(f"file:{server.folder / 'polar.db'}?mode=ro", uri=True)) as db:
        return [error for (error,) in db.execute("SELECT error FROM deliveries").fetchall()]


def test_last_result_sends_the_callback(server: Server) -> None:
    node = server.node()
    with receiving() as receiver:
        server.submit("now", num_samples=2, callback_url=receiver.url)
        for lease in node.lease(2):
            assert receiver.bodies == []
            node.finish(lease)
        eventually(lambda: receiver.bodies)
    document = json.loads(receiver.bodies[0])
    task = server.task("now")
    assert document == {key: task[key] for key in ("task_id", "status", "results", "result_paths")}


@pytest.mark.slow
def test_every_way_not_to_acknowledge_is_followed_by_another_try(make_server: Callable[..., Server]) -> None:
    scripts: dict[str, list[int | str]] = {
        "refuses five times": [500] * 5,
        "has no such path": [404],
        "redirects": [301, 302, 307, 308],
        "is not satisfied": [304, 401, 429],
        "hangs": ["hang", "hang"],
        "closes half-way": ["half", "half"],
        "closes within its answer": ["cut", "cut"],
    }
    server = make_server(callback_timeout_seconds=1.0)
    node = server.node()
    with ExitStack() as stack:
        elsewhere = stack.enter_context(receiving())
        receivers = {name: stack.enter_context(receiving(*script)) for name, script in scripts.items()}
        for name, receiver in receivers.items():
            receiver.elsewhere = elsewhere.url
            finish(server, node, name, callback_url=receiver.url)
        eventually(lambda: "the connection ended before the answer was whole" in problems(server), 30)
        eventually(lambda: states(server) == dict.fromkeys(scripts, "delivered"), 60)
        for name, receiver in receivers.items():
            assert len(receiver.deliveries) == len(scripts[name]) + 1, name
            assert len(set(receiver.deliveries)) == 1, "a repeat has the same id"
            assert json.loads(receiver.bodies[-1])["task_id"] == name
    assert elsewhere.bodies == []


def test_slow_receiver_that_acknowledges_in_time_hears_once(make_server: Callable[..., Server]) -> None:
    server = make_server(callback_timeout_seconds=20.0)
    with receiving() as receiver:
        receiver.pause = 1.5
        finish(server, server.node(), "slow", callback_url=receiver.url)
        eventually(lambda: states(server) == {"slow": "delivered"})
    assert len(receiver.deliveries) == 1


def test_receiver_that_was_down_gets_it_when_it_is_back(server: Server) -> None:
    node = server.node()
    with nobody() as port:
        finish(server, node, "down", callback_url=callback_url(port))
        eventually(lambda: states(server)["down"] == "pending")
        with receiving(port=port) as receiver:
            eventually(lambda: receiver.deliveries)
            eventually(lambda: states(server)["down"] == "delivered")
    assert len(receiver.deliveries) == 1


def test_receiver_that_hangs_delays_no_other(server: Server) -> None:
    node = server.node()
    with receiving(*["hang"] * 20) as stuck, receiving() as receiver:
        for number in range(12):
            finish(server, node, f"stuck-{number}", callback_url=stuck.url)
        eventually(lambda: len(stuck.bodies) == 8)
        finish(server, node, "free", callback_url=receiver.url)
        eventually(lambda: receiver.bodies)
        assert len(stuck.bodies) == 8


def test_many_callbacks_after_an_outage_come_a_few_at_a_time(make_server: Callable[..., Server]) -> None:
    outage(make_server(), 150)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_thousand_callbacks_after_an_outage_come_a_few_at_a_time(make_server: Callable[..., Server]) -> None:
    outage(make_server(), 2000)


def outage(server: Server, tasks: int) -> None:
    """The receiver and the server are down, then both are back."""
    names = [f"late-{number}" for number in range(tasks)]
    with nobody() as port:
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda name: server.submit(name, callback_url=callback_url(port)).status_code, names)
            assert set(answers) == {200}
            cancelled = pool.map(lambda name: server.http.delete(f"/rollout/task/{name}").json()["status"], names)
            assert set(cancelled) == {"cancelled"}
        server.restart()
        with receiving(port=port) as receiver:
            receiver.pause = 0.02
            eventually(lambda: len(receiver.deliveries) >= tasks, 600)
            eventually(lambda: set(states(server).values()) == {"delivered"}, 60)
    assert len(receiver.deliveries) == len(set(receiver.deliveries)) == tasks
    assert receiver.most_at_once <= 8


def test_large_callback_is_never_whole_in_memory_and_holds_nobody_up(make_server: Callable[..., Server]) -> None:
    """Above 60 MB of JSON, in ten sessions."""
    server = make_server()
    node = server.node()
    with receiving() as receiver:
        server.submit("large", num_samples=10, callback_url=receiver.url)
        for lease in node.lease(10):
            node.result(long_result(lease, node, 300_000))
        slowest = max(answer_times(server, until=lambda: bool(receiver.bodies)))
    assert len(receiver.bodies[0]) > 60 << 20
    assert len(json.loads(receiver.bodies[0])["results"]) == 10
    assert server.memory < 250 << 20
    assert slowest < 10.0, "seconds for a small answer meanwhile, on a busy machine"


def long_result(lease: Lease, node: Node, tokens: int) -> msgspec.Struct:
    trace = Trace(
        prompt_ids=np.arange(4),
        response_ids=np.arange(tokens) + 100_000,
        loss_mask=np.ones(tokens),
        response_logprobs=np.linspace(-0.123456, -2.3, tokens),
        reward=1.0,
    )
    return done(lease, node, traces=[trace], log_sha256=None)


def answer_times(server: Server, until: Callable[[], bool]) -> Iterator[float]:
    deadline = time.monotonic() + 120
    while not until():
        began = time.monotonic()
        assert began < deadline
        assert server.http.get("/health").status_code == 200
        yield time.monotonic() - began


def test_kill_between_the_acknowledgement_and_its_record_brings_it_again(make_server: Callable[..., Server]) -> None:
    """The server stands still while the receiver acknowledges, and is killed before it goes on."""
    server = make_server()
    node = server.node()
    with receiving() as receiver:
        freeze_when_answered(receiver, server)
        finish(server, node, "twice", callback_url=receiver.url)
        eventually(lambda: receiver.answered == 1)
        receiver.before_answer = lambda: None
        server.restart()
        eventually(lambda: states(server) == {"twice": "delivered"})
    first, second = receiver.deliveries
    assert first == second
    assert receiver.bodies[0] == receiver.bodies[1]


def freeze_when_answered(receiver: Receiver, server: Server) -> None:
    assert server.process is not None
    pid = server.process.pid
    receiver.before_answer = lambda: os.kill(pid, signal.SIGSTOP)


def test_receiver_on_another_port_gets_it_after_a_resubmission(server: Server) -> None:
    node = server.node()
    with nobody() as port, receiving() as receiver:
        finish(server, node, "moved", callback_url=callback_url(port))
        assert server.submit("moved", callback_url=receiver.url).json()["status"] == "completed"
        eventually(lambda: receiver.bodies)
        server.submit("moved", callback_url=receiver.url)
        eventually(lambda: states(server)["moved"] == "delivered")
    assert len(receiver.bodies) == 1


def test_delivered_result_goes_to_a_new_receiver_too(server: Server) -> None:
    node = server.node()
    with receiving() as first, receiving() as second:
        finish(server, node, "both", callback_url=first.url)
        eventually(lambda: first.bodies)
        server.submit("both", callback_url=second.url)
        eventually(lambda: second.bodies)
    assert first.deliveries != second.deliveries
    assert first.bodies == second.bodies


def test_url_that_leads_nowhere_fails_its_own_callback_alone(server: Server) -> None:
    node = server.node()
    with receiving() as receiver:
        for number, url in enumerate(
            ("http://nosuch.invalid/", f"http://{'a' * 200}/", "http://127.0.0.1:1/", "http://ü..x/")
        ):
            finish(server, node, f"nowhere-{number}", callback_url=url)
        finish(server, node, "somewhere", callback_url=receiver.url)
        eventually(lambda: receiver.bodies)
        eventually(lambda: [states(server)[f"nowhere-{number}"] for number in range(4)] == ["pending"] * 4)


def test_failed_and_cancelled_tasks_are_delivered(server: Server) -> None:
    node = server.node()
    with receiving() as receiver:
        server.submit("failed", callback_url=receiver.url, max_attempts=1)
        node.result(fault(node.lease()[0], node))
        eventually(lambda: receiver.bodies)
        server.submit("cancelled", callback_url=receiver.url)
        server.http.delete("/rollout/task/cancelled")
        eventually(lambda: len(receiver.bodies) == 2)
    assert [json.loads(body)["status"] for body in receiver.bodies] == ["failed", "cancelled"]


def test_callback_in_msgpack_has_packed_arrays(server: Server) -> None:
    node = server.node()
    with receiving() as receiver:
        finish(server, node, "packed-callback", callback_url=receiver.url, callback_format="msgpack")
        eventually(lambda: receiver.bodies)
    assert receiver.types == ["application/msgpack"]
    result = from_msgpack(receiver.bodies[0], TaskResult)
    assert (result.status, result.results[0].trajectory.traces[0].response_ids.dtype) == (TaskState.COMPLETED, "int32")


def test_case_49_late_result_and_repeated_callback_change_nothing(server: Server) -> None:
    """The first attempt ends after the second was accepted, and the receiver's acknowledgement is lost."""
    node = server.node()
    with receiving(500) as receiver:
        server.submit("late", callback_url=receiver.url)
        (first,) = node.lease()
        node.result(fault(first, node))
        (second,) = node.lease()
        node.finish(second)
        late = node.finish(first, status=SessionStatus.ERROR, termination=Termination.NO_CALLS)
        assert (late.accepted, late.winner) == (False, 2)
        eventually(lambda: len(receiver.bodies) == 2)
    assert len(set(receiver.deliveries)) == 1
    assert json.loads(receiver.bodies[1])["results"][0]["metadata"]["attempt"] == 2


def test_case_56_stuck_session_ends_by_cancellation_and_the_callback_comes(server: Server) -> None:
    """One of a group never ends: whoever waits gives the task up, and hears what the others did."""
    node = server.node()
    with receiving() as receiver:
        server.submit("group-of-4", num_samples=4, callback_url=receiver.url)
        *quick, stuck = node.lease(4)
        for lease in quick:
            node.finish(lease)
        server.http.delete("/rollout/task/group-of-4")
        node.result(done(stuck, node, status=SessionStatus.ERROR, termination=Termination.CANCELLED, traces=None))
        eventually(lambda: receiver.bodies)
    results = json.loads(receiver.bodies[0])["results"]
    assert sorted(result["status"] for result in results) == ["COMPLETED"] * 3 + ["ERROR"]
