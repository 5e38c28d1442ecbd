"""One event after another, where the order matters: what the machine makes of each."""

from __future__ import annotations

from itertools import pairwise

import pytest
from tests.server.machines import (
    LEASE,
    ask,
    expire,
    one_trace,
    poll,
    request_for,
    result_for,
    save,
    scene,
    start_from,
    submit,
    take,
)

from polar.nodeapi import GATEWAY_STOPPED, Order, Workers
from polar.records import Resources, SessionStatus, TaskState, Termination
from polar.server.fleet import FORGET_SECONDS, StaleEpoch
from polar.server.machine import Machine
from polar.server.owed import LONGEST_WAIT
from polar.server.state import AttemptState, DeliveryState
from polar.server.tables import Tables


def test_late_result_of_a_lost_attempt_wins_and_its_successor_is_cancelled() -> None:
    machine, task = scene()
    now = expire(machine)
    (second,) = take(machine, "b", now)
    assert second.number == 2
    session = task.sessions[0]
    assert machine.result(result_for(session.session_id, 1, Termination.DONE), now).accepted
    assert second.state is AttemptState.SUPERSEDED
    assert [cancel.why for cancel in machine.fleet.nodes["b"].cancels] == ["lost"]
    late = machine.result(result_for(session.session_id, 2, Termination.DONE), now)
    assert (late.accepted, late.winner, second.state) == (False, 1, AttemptState.LATE)


def test_gateway_that_comes_back_goes_on_unless_another_has_the_session() -> None:
    machine, task = scene()
    now = expire(machine)
    name = task.sessions[0].session_id
    assert task.sessions[0].queued
    assert poll(machine, "a", now, held=(name, 1)) == []
    assert not task.sessions[0].queued
    expired = now + 2 * LEASE
    for second in range(int(now), int(expired)):
        machine.tick(float(second))
    take(machine, "b", expired)
    assert poll(machine, "a", expired, held=(name, 1)) == ["lost"]
    assert poll(machine, "b", expired, held=(name, 2)) == []


def test_fault_goes_elsewhere_and_its_repeat_changes_nothing() -> None:
    machine, task = scene(attempts=3)
    name = task.sessions[0].session_id
    for _ in range(2):
        assert not machine.result(result_for(name, 1, Termination.INFRASTRUCTURE), 1.0).accepted
    for node in ("a", "b"):
        machine.ask(node, 1, Workers(init=1, run=1, postrun=1), 1.0)
    (second,) = machine.place(1.0)
    assert (second.number, second.node_id) == (2, "b")
    assert not machine.result(result_for(name, 1, Termination.INFRASTRUCTURE), 1.0).accepted
    assert task.sessions[0].live is second


def test_an_attempt_that_its_gateways_stop_ended_is_not_counted() -> None:
    machine, task = scene(attempts=1)
    session = task.sessions[0]
    ask(machine, "a", 1.0)
    for number in (1, 2, 3):
        stopped = result_for(session.session_id, number, Termination.INFRASTRUCTURE, fault=GATEWAY_STOPPED)
        assert not machine.result(stopped, 1.0).accepted
        assert machine.place(1.0) == [], "the gateway that stops gets it again"
        assert (session.queued, session.fault) == (True, GATEWAY_STOPPED)
        (attempt,) = take(machine, "a", 1.0)
        assert attempt.number == number + 1
        machine.result(stopped, 1.0)
        assert session.live is attempt
    machine.result(result_for(session.session_id, 4, Termination.INFRASTRUCTURE, fault="disk_full"), 1.0)
    assert (session.status, task.status) == (SessionStatus.ERROR, TaskState.FAILED)


def test_last_attempts_fault_ends_session_and_task() -> None:
    machine, task = scene(attempts=1)
    assert machine.result(result_for(task.sessions[0].session_id, 1, Termination.INFRASTRUCTURE), 1.0).accepted
    assert (task.sessions[0].status, task.status) == (SessionStatus.ERROR, TaskState.FAILED)
    assert task.error is not None
    assert "1 infrastructure" in task.error


def test_gateway_that_starts_anew_loses_its_sessions_at_once() -> None:
    machine, task = scene()
    poll(machine, "a", 1.0, epoch=2)
    assert task.sessions[0].queued
    assert poll(machine, "a", 1.0, epoch=2, held=(task.sessions[0].session_id, 1)) == ["lost"]
    with pytest.raises(StaleEpoch):
        poll(machine, "a", 1.0, epoch=1)


def test_server_that_was_away_blames_nobody() -> None:
    machine, task = scene()
    machine.tick(1.0)
    machine.tick(1000.0)
    assert task.sessions[0].live is not None
    for second in range(1001, 1001 + int(LEASE) + 1):
        machine.tick(float(second))
    assert task.sessions[0].live is None


def test_server_that_starts_anew_gives_every_lease_a_fresh_term() -> None:
    disk = Tables(":memory:")
    machine, _ = scene()
    tick(machine, 0.0, LEASE - 1)
    save(machine, disk, LEASE - 1)
    machine = start_from(disk)
    (session,) = machine.sessions.values()
    tick(machine, LEASE - 1, 2 * LEASE - 1.5)
    assert session.live is not None
    machine.tick(2 * LEASE)
    assert session.queued
    disk.close()


def test_lease_whose_reply_was_lost_is_offered_again() -> None:
    machine, task = scene()
    assert machine.unheard(machine.fleet.nodes["a"], 5.0) == []
    assert machine.unheard(machine.fleet.nodes["a"], 11.0) == [task.sessions[0].live]
    poll(machine, "a", 11.0, held=(task.sessions[0].session_id, 1))
    assert machine.unheard(machine.fleet.nodes["a"], 20.0) == []


def test_early_stop_leaves_the_group_completed() -> None:
    machine, task = scene(samples=3, early_stop_min_usable_sessions=1)
    first, second, third = task.sessions
    take(machine, "b", 0.0)
    done = result_for(first.session_id, 1, Termination.DONE, traces=[one_trace()])
    machine.result(done, 1.0)
    assert third.termination is Termination.EARLY_STOP
    assert [cancel.why for cancel in machine.fleet.nodes["b"].cancels] == ["early_stop"]
    machine.result(result_for(second.session_id, 1, Termination.EARLY_STOP), 2.0)
    assert task.status is TaskState.COMPLETED
    assert [session.usable for session in task.sessions] == [True, False, False]


def test_fault_of_a_cancelled_session_is_no_new_attempt() -> None:
    machine, task = scene(attempts=3)
    machine.cancel(task, 1.0)
    assert task.status is TaskState.CANCELLING
    machine.result(result_for(task.sessions[0].session_id, 1, Termination.INFRASTRUCTURE), 1.0)
    assert (task.status, task.sessions[0].termination) == (TaskState.CANCELLED, Termination.CANCELLED)


def test_lost_lease_that_its_gateway_still_has_needs_room_to_be_taken_back() -> None:
    machine, task = scene(samples=2, runtime={"cpus": 2})
    first, second = task.sessions
    poll(machine, "a", resources=Resources(cpus=2))
    now = expire(machine)
    poll(machine, "a", now, resources=Resources(cpus=2))
    assert [lease.session_id for lease in take(machine, "a", now)] == [second.session_id]
    assert poll(machine, "a", now, held=(first.session_id, 1), resources=Resources(cpus=2)) == ["lost"]
    assert first.queued


# Pauses


def pause(machine: Machine, now: float, seconds: float = 100.0) -> None:
    machine.fleet.order(Order(id="p", kind="pause", mode="abort", timeout_seconds=seconds), now)


def told(machine: Machine, node: str) -> list[tuple[str, str, float]]:
    return [(order.id, order.kind, order.timeout_seconds) for order in machine.fleet.nodes[node].orders]


def tick(machine: Machine, since: float, until: float) -> None:
    for step in range(int(2 * (until - since)) + 1):
        machine.tick(since + step / 2)


def test_waiting_anew_has_a_budget_anew() -> None:
    machine, task = scene(budgets={"queue": 40})
    now = expire(machine)
    tick(machine, now, now + 38)
    assert task.sessions[0].queued
    machine.tick(now + 39)
    assert task.sessions[0].termination is Termination.QUEUE


def test_node_that_joins_while_paused_is_told_with_the_time_that_is_left() -> None:
    machine, _ = scene()
    pause(machine, 10.0)
    poll(machine, "a", 30.0)
    assert told(machine, "a") == [("p", "pause", 80.0)]
    poll(machine, "a", 40.0, acked=["p"])
    assert told(machine, "a") == []
    poll(machine, "new", 50.0)
    poll(machine, "a", 60.0, epoch=2)
    assert told(machine, "new") == [("p", "pause", 60.0)]
    assert told(machine, "a") == [("p", "pause", 50.0)]


def test_node_that_was_out_of_reach_is_told_of_the_pause_and_of_its_end() -> None:
    machine, _ = scene()
    tick(machine, 0.0, 100.0)
    assert machine.fleet.live(100.0) == []
    pause(machine, 100.0)
    poll(machine, "a", 110.0)
    assert [kind for _, kind, _ in told(machine, "a")] == ["pause"]
    machine.fleet.order(Order(id="r", kind="resume"), 120.0)
    poll(machine, "a", 120.0)
    poll(machine, "b", 120.0)
    assert [[name for name, _, _ in told(machine, node)] for node in ("a", "b")] == [["r"], ["r"]]


def test_pause_ends_by_itself() -> None:
    machine, _ = scene()
    tick(machine, 0.0, 10.0)
    pause(machine, 10.0)
    tick(machine, 10.5, 109.5)
    assert machine.fleet.paused(109.5)
    machine.tick(110.0)
    assert not machine.fleet.paused(110.0)
    poll(machine, "a", 110.0)
    assert told(machine, "a") == []


def test_pause_outlives_the_server_for_the_time_that_is_left() -> None:
    disk = Tables(":memory:")
    machine, _ = scene()
    pause(machine, 10.0)
    poll(machine, "a", 20.0, acked=["p"])
    save(machine, disk, 30.0)
    machine = start_from(disk)
    assert machine.fleet.paused(30.0)
    poll(machine, "a", 40.0)
    assert told(machine, "a") == [("p+", "pause", 70.0)]
    tick(machine, 30.0, 110.0)
    save(machine, disk, 110.0)
    assert not start_from(disk).fleet.paused(110.0)
    disk.close()


def test_paused_time_is_no_waiting() -> None:
    machine, task = scene(samples=2, budgets={"queue": 50})
    session = task.sessions[1]
    tick(machine, 0.0, 40.0)
    pause(machine, 40.0)
    tick(machine, 40.5, 139.5)
    assert session.queued
    tick(machine, 140.0, 149.5)
    assert session.queued
    machine.tick(150.0)
    assert session.termination is Termination.QUEUE


def test_time_that_the_server_was_away_is_no_waiting_either() -> None:
    machine, task = scene(samples=2, budgets={"queue": 50})
    tick(machine, 0.0, 40.0)
    machine.tick(100_000.0)
    assert task.sessions[1].queued
    tick(machine, 100_000.5, 100_010.0)
    assert task.sessions[1].termination is Termination.QUEUE


# Nodes that are gone


def test_node_not_heard_of_for_a_day_is_forgotten_with_its_row() -> None:
    disk = Tables(":memory:")
    machine, _ = scene()
    save(machine, disk, 0.0)
    for step in range(int(FORGET_SECONDS // 10) + 2):
        if step % 1000 == 0:
            poll(machine, "b", 10.0 * step)
        machine.tick(10.0 * step)
    assert list(machine.fleet.nodes) == ["b"]
    save(machine, disk, FORGET_SECONDS)
    assert [node.node_id for node in disk.nodes()] == ["b"]
    poll(machine, "a", FORGET_SECONDS)
    save(machine, disk, FORGET_SECONDS)
    assert {node.node_id for node in disk.nodes()} == {"a", "b"}
    disk.close()


def test_node_that_comes_back_before_it_was_saved_as_forgotten_stays() -> None:
    disk = Tables(":memory:")
    machine, _ = scene()
    for step in range(int(FORGET_SECONDS // 10) + 2):
        machine.tick(10.0 * step)
    assert not machine.fleet.nodes
    poll(machine, "a", FORGET_SECONDS)
    save(machine, disk, FORGET_SECONDS)
    assert [node.node_id for node in disk.nodes()] == ["a"]
    disk.close()


# Callbacks


def test_callback_is_tried_again_until_its_deadline() -> None:
    machine, task = scene(attempts=1)
    machine.result(result_for(task.sessions[0].session_id, 1, Termination.DONE), 0.0)
    tries = []
    for step in range(300):
        now = step / 2
        machine.tick(now)
        while machine.owed.due:
            tries.append(now)
            machine.owed.not_delivered(machine.owed.due.pop(), "500", now)
    assert tries == [0.0, 0.5, 1.5, 3.5, 7.5, 15.5, 31.5, 61.5, 91.5]
    assert task.delivery is not None
    assert task.delivery.state is DeliveryState.EXPIRED
    assert task.over


@pytest.mark.parametrize("restarts_at", [None, 300.0])
def test_receiver_that_is_down_for_ten_minutes_gets_its_callback_all_the_same(restarts_at: float | None) -> None:
    disk = Tables(":memory:")
    machine = Machine(LEASE, 3600.0)
    task = submit(machine, request_for("one"))
    poll(machine, "a")
    take(machine, "a", 0.0)
    machine.result(result_for(task.sessions[0].session_id, 1, Termination.DONE), 0.0)
    tries: list[tuple[float, str]] = []
    for step in range(2400):
        now = step / 2
        if now == restarts_at:
            machine = start_from(disk, LEASE, 3600.0)
        machine.tick(now)
        while machine.owed.due:
            delivery = machine.owed.due.pop()
            tries.append((now, delivery.delivery_id))
            if now < 600:
                machine.owed.not_delivered(delivery, "connection refused", now)
            else:
                machine.owed.delivered(delivery)
        save(machine, disk, now)
    times = [when for when, _ in tries]
    assert max(later - earlier for earlier, later in pairwise(times)) <= LONGEST_WAIT
    assert len(tries) <= 30
    assert 600 <= times[-1] <= 600 + LONGEST_WAIT
    assert len({name for _, name in tries}) == 1
    assert disk.select("SELECT state, tries FROM deliveries") == [("delivered", len(tries) - 1)]
    disk.close()
