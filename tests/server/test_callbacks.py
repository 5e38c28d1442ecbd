"""A callback arrives at once, and again until it is acknowledged."""

from __future__ import annotations

import json

from tests.peers.node import done, fault
from tests.peers.receiver import receiving
from tests.server.conftest import Server, eventually

from polar.codec import from_msgpack
from polar.records import SessionStatus, TaskResult, TaskState, Termination


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


def test_refused_callback_comes_again_under_the_same_id(server: Server) -> None:
    node = server.node()
    with receiving(500, 404, 302) as receiver:
        server.submit("again", callback_url=receiver.url)
        node.finish(node.lease()[0])
        eventually(lambda: len(receiver.deliveries) == 4)
    assert len(set(receiver.deliveries)) == 1
    assert len(set(receiver.bodies)) == 1


def test_receiver_that_hangs_delays_no_other(server: Server) -> None:
    node = server.node()
    with receiving("hang") as stuck, receiving() as receiver:
        server.submit("stuck", callback_url=stuck.url)
        server.submit("free", callback_url=receiver.url)
        for lease in node.lease(2):
            node.finish(lease)
        eventually(lambda: receiver.bodies and stuck.bodies)


def test_receiver_on_another_port_gets_it_after_a_resubmission(server: Server) -> None:
    node = server.node()
    with receiving() as gone:
        pass
    server.submit("moved", callback_url=gone.url)
    node.finish(node.lease()[0])
    with receiving() as receiver:
        assert server.submit("moved", callback_url=receiver.url).json()["status"] == "completed"
        eventually(lambda: receiver.bodies)
        server.submit("moved", callback_url=receiver.url)
    assert len(receiver.bodies) == 1


def test_delivered_result_goes_to_a_new_receiver_too(server: Server) -> None:
    node = server.node()
    with receiving() as first, receiving() as second:
        server.submit("both", callback_url=first.url)
        node.finish(node.lease()[0])
        eventually(lambda: first.bodies)
        server.submit("both", callback_url=second.url)
        eventually(lambda: second.bodies)
    assert first.deliveries != second.deliveries
    assert first.bodies == second.bodies


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
        server.submit("packed-callback", callback_url=receiver.url, callback_format="msgpack")
        node.finish(node.lease()[0])
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
