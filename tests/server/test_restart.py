"""kill -9 at any moment: what was accepted is there again, and each result exists once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from tests.peers.node import done
from tests.peers.receiver import callback_url, nobody, receiving
from tests.server.conftest import TOKEN, Server, eventually

from polar.config import RolloutSettings
from polar.errors import ConfigError
from polar.nodeapi import Held
from polar.records import SessionStatus
from polar.server.core import Core


def test_results_tasks_and_leases_survive(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    server.submit("done")
    node.finish(node.lease()[0])
    server.submit("running", num_samples=2)
    (lease,) = node.lease()
    before = server.task("done")
    server.restart()
    assert server.task("done") == before
    assert server.task("running")["status"] == "running"
    node.held = [Held(session_id=lease.session_id, attempt=1, stage=SessionStatus.RUNNING)]
    assert node.poll().cancels == []
    assert node.finish(lease).accepted
    (other,) = node.lease()
    assert (other.session_id != lease.session_id, other.attempt) == (True, 1)
    node.finish(other)
    assert server.task("running")["status"] == "completed"


def test_result_whose_reply_was_lost_is_accepted_once(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    server.submit("once")
    (lease,) = node.lease()
    node.finish(lease)
    before = server.task("once")
    server.restart()
    repeat = node.result(done(lease, node, reward=0.25))
    assert (repeat.accepted, repeat.winner) == (True, 1)
    assert server.task("once") == before


def test_lost_lease_is_the_next_attempt_and_the_late_result_is_kept_apart(make_server: Callable[..., Server]) -> None:
    server = make_server(lease_seconds=1.0)
    first, second = server.node("first"), server.node("second")
    server.submit("moved")
    (lost,) = first.lease()
    (lease,) = second.lease()
    assert (lease.session_id, lease.attempt) == (lost.session_id, 2)
    second.finish(lease)
    late = first.finish(lost, reward=0.0)
    assert (late.accepted, late.winner) == (False, 2)
    task = server.task("moved")
    assert [result["metadata"]["attempt"] for result in task["results"]] == [2]
    assert task["results"][0]["trajectory"]["metadata"]["evaluation"]["outcome_reward"] == 1.0
    log = server.http.get(f"/tasks/moved/sessions/{lost.session_id}/log", params={"attempt": 1})
    assert log.content == f"log of {lost.session_id}.1".encode()


def test_callback_not_yet_delivered_goes_out_after_the_restart(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    with nobody() as port:
        server.submit("owed", callback_url=callback_url(port))
        node.finish(node.lease()[0])
        server.restart()
        with receiving(port=port) as receiver:
            eventually(lambda: receiver.deliveries)
    assert len(set(receiver.deliveries)) == 1


def test_kill_at_many_moments_gives_one_result_a_session(make_server: Callable[..., Server]) -> None:
    server = make_server()
    names = [f"task-{index}" for index in range(3)]
    for index, name in enumerate(names):
        server.submit(name, num_samples=2)
        node = server.node()
        leases = node.lease(1 + index % 2)
        for lease in leases[: index % 3]:
            node.finish(lease)
        server.restart()
    node = server.node(epoch=2)
    attempts: list[int] = []
    while any(server.task(name, results="false")["status"] == "running" for name in names):
        for lease in node.lease():
            attempts.append(lease.attempt)
            node.finish(lease)
    for name in names:
        results = server.task(name)["results"]
        assert [result["metadata"]["session_index"] for result in results] == [0, 1]
        assert all(result["status"] == "COMPLETED" for result in results)


def test_server_stops_at_once_though_requests_are_held_open(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    node.poll()
    server.submit("kept")
    node.lease()
    asking = threading.Thread(target=node.work)
    asking.start()
    with server.http.stream("GET", "/events") as stream:
        lines = stream.iter_lines()
        assert next(lines) == "event: hello"
        began = time.monotonic()
        assert server.stop() == 0
        assert time.monotonic() - began < 15
        assert "event: ping" not in list(lines)
    asking.join(20)
    server.start()
    assert server.task("kept")["status"] == "running"


def test_task_cancelled_before_it_came_is_refused_after_a_restart(make_server: Callable[..., Server]) -> None:
    server = make_server()
    cancelled = server.http.delete("/rollout/task/early", params={"register_if_missing": "true"})
    assert (cancelled.status_code, cancelled.json()["status"]) == (200, "cancelled")
    server.restart()
    refused = server.submit("early")
    assert refused.status_code == 409
    assert "cancelled before it was submitted" in refused.json()["detail"]
    assert server.submit("other").status_code == 200


def test_two_servers_never_share_a_folder(make_server: Callable[..., Server]) -> None:
    server = make_server()
    with pytest.raises(ConfigError, match="another rollout server uses the folder"):
        Core(RolloutSettings(save_dir=str(server.folder)), TOKEN)
