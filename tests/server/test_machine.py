"""Any order of events: one accepted result a session, none lost, none leased twice, every callback owed until it is
acknowledged or out of time; also when the server starts anew from what it saved, and when its clock jumps."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from polar.nodeapi import EngineState, Held, NodeResult, PollRequest, Workers
from polar.records import CallCounts, GatewayMetrics, SessionStatus, TaskState, Termination, TokenLedger, Trace
from polar.requests import TaskRequest
from polar.server.fleet import StaleEpoch
from polar.server.machine import Machine
from polar.server.state import Attempt, AttemptState, Delivery, DeliveryState, Task
from polar.server.submission import new_task
from polar.server.tables import Tables

LEASE, DELIVERY = 30.0, 100.0
NODES = ["a", "b", "c"]
TASKS = ["one", "two"]
ENGINE = EngineState(kind="scripted", healthy=True)


def request_for(task_id: str, samples: int, attempts: int, enough: int | None, queue: float | None) -> TaskRequest:
    return TaskRequest.model_validate(
        {
            "task_id": task_id,
            "instruction": "x",
            "num_samples": samples,
            "agent": {"harness": "mini_swe_agent"},
            "callback_url": "http://127.0.0.1:9/first",
            "max_attempts": attempts,
            "early_stop_min_usable_sessions": None if enough is None else min(enough, samples),
            "budgets": {"queue": queue},
        }
    )


def result_for(session_id: str, attempt: int, termination: Termination) -> NodeResult:
    good = termination is Termination.DONE
    return NodeResult(
        session_id=session_id,
        attempt=attempt,
        node_id="a",
        epoch=1,
        status=SessionStatus.COMPLETED if good else SessionStatus.ERROR,
        termination=termination,
        retryable=termination is Termination.INFRASTRUCTURE,
        traces=[] if good else None,
        tokens=TokenLedger(sampled=7, trainable=7),
        calls=CallCounts(completions=2),
    )


def report(node: str, epoch: int, held: list[Held]) -> PollRequest:
    return PollRequest(
        node_id=node,
        epoch=epoch,
        gateway_url="",
        workers=Workers(init=2, run=2, postrun=2),
        room=Workers(init=0, run=0, postrun=0),
        metrics=GatewayMetrics(),
        engine=ENGINE,
        harnesses=["mini_swe_agent"],
        held=held,
    )


def one_trace() -> Trace:
    return Trace(prompt_ids=np.arange(2), response_ids=np.arange(2), loss_mask=np.ones(2))


class Anything(RuleBasedStateMachine):
    """The surroundings of a machine: nodes with their own ideas of what they hold, and a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine(LEASE, DELIVERY)
        self.now = 0.0
        self.disk = Tables(":memory:")
        self.epochs = dict.fromkeys(NODES, 1)
        self.held: dict[str, set[tuple[str, int]]] = {node: set() for node in NODES}
        self.ever_leased: list[tuple[str, int]] = []
        self.ended: dict[str, tuple[SessionStatus, int | None]] = {}
        self.accepted: dict[str, set[int]] = {}
        self.owed: dict[str, float] = {}
        self.acknowledged: set[str] = set()
        self.sent: list[Delivery] = []

    # The disk

    def save(self) -> None:
        rows = list(self.machine.dirty.values())
        self.disk.commit([(type(row), self.disk.values(row)) for row in rows], self.now)
        for row in rows:
            if isinstance(row, Delivery):
                self.owed.setdefault(row.delivery_id, row.deadline)
        self.machine.dirty.clear()
        self.sent += self.machine.owed.due
        self.machine.owed.due.clear()

    @rule()
    def restart(self) -> None:
        """kill -9, and a start from the rows alone."""
        self.machine = Machine(LEASE, DELIVERY)
        self.machine.fleet.load(self.disk.nodes(), self.disk.pause())
        for task in self.disk.tasks():
            self.machine.adopt(task)
        self.machine.restart(self.disk.uptime())
        self.sent = []

    @rule(task_id=st.sampled_from(TASKS))
    def put_away(self, task_id: str) -> None:
        task = self.machine.tasks.get(task_id)
        if task is not None and task.over:
            self.machine.forget(task)

    def find(self, task_id: str) -> Task | None:
        if task_id not in self.machine.tasks:
            for task in self.disk.tasks("task_id = ?", (task_id,)):
                self.machine.adopt(task)
        return self.machine.tasks.get(task_id)

    # Trainers

    @initialize()
    def start(self) -> None:
        """Most of what can go wrong needs a task, and gateways that take it."""
        for node in NODES:
            self.poll(node, True)
        self.submit("one", 2, 3, None, None)
        self.work("a", 1, True)
        self.work("b", 1, True)

    @rule(
        task_id=st.sampled_from(TASKS),
        samples=st.integers(1, 3),
        attempts=st.integers(1, 3),
        enough=st.none() | st.integers(1, 3),
        queue=st.none() | st.just(50.0),
    )
    def submit(self, task_id: str, samples: int, attempts: int, enough: int | None, queue: float | None) -> None:
        if self.find(task_id) is not None:
            return
        task = new_task(request_for(task_id, samples, attempts, enough, queue), self.now, 0.0)
        self.machine.submit(task)
        self.save()
        self.machine.admit(task)
        self.save()

    @rule(task_id=st.sampled_from(TASKS))
    def cancel(self, task_id: str) -> None:
        task = self.find(task_id)
        if task is not None:
            self.machine.cancel(task, self.now)
            self.save()

    @rule(task_id=st.sampled_from(TASKS), url=st.sampled_from(["first", "second"]))
    def redirect(self, task_id: str, url: str) -> None:
        task = self.find(task_id)
        if task is None:
            return
        before = task.delivery
        self.machine.redirect(task, f"http://127.0.0.1:9/{url}", self.now)
        if before is not None and before is not task.delivery:
            self.owed[before.delivery_id] = float("-inf")
            self.owed.pop(task.delivery.delivery_id if task.delivery else "", None)
            self.acknowledged.discard(task.delivery.delivery_id if task.delivery else "")
        self.save()

    # Gateways

    @rule(node=st.sampled_from(NODES), arrives=st.booleans())
    def poll(self, node: str, arrives: bool) -> None:
        """`arrives` False: the reply is lost."""
        held = [Held(session_id=name, attempt=number, stage=SessionStatus.RUNNING) for name, number in self.held[node]]
        cancels = self.machine.poll(report(node, self.epochs[node], held), self.now, 0.0)
        again = self.machine.unheard(self.machine.fleet.nodes[node], self.now)
        self.save()
        if arrives:
            self.held[node] -= {(cancel.session_id, cancel.attempt) for cancel in cancels if cancel.why == "lost"}
            self.held[node] |= {(attempt.session_id, attempt.number) for attempt in again}

    @rule(node=st.sampled_from(NODES), room=st.integers(1, 3), arrives=st.booleans())
    def work(self, node: str, room: int, arrives: bool) -> None:
        asked = self.machine.ask(node, self.epochs[node], Workers(init=room, run=room, postrun=room), self.now)
        leases = self.machine.place(self.now)
        self.save()
        assert len(leases) <= (room if asked is not None else 0)
        for attempt in leases:
            assert attempt.node_id == node
            assert (attempt.session_id, attempt.number) not in self.ever_leased
            self.ever_leased.append((attempt.session_id, attempt.number))
            if arrives:
                self.held[node].add((attempt.session_id, attempt.number))
        if asked is not None:
            asked.asking, asked.cancels = None, []

    @rule(node=st.sampled_from(NODES))
    def gateway_dies(self, node: str) -> None:
        self.epochs[node] += 1
        self.held[node].clear()

    @precondition(lambda self: self.machine.fleet.nodes)
    @rule(node=st.sampled_from(NODES))
    def old_gateway_polls(self, node: str) -> None:
        known = self.machine.fleet.nodes.get(node)
        if known is None or known.epoch == 0:
            return
        try:
            self.machine.ask(node, known.epoch - 1, Workers(init=1, run=1, postrun=1), self.now)
        except StaleEpoch:
            return
        assert known.seen_at is None

    @precondition(lambda self: self.ever_leased)
    @rule(
        data=st.data(),
        termination=st.sampled_from([Termination.DONE, Termination.INFRASTRUCTURE, Termination.PREPARE]),
    )
    def result(self, data: st.DataObject, termination: Termination) -> None:
        """Of any attempt there ever was: first, second, late, of a lost attempt."""
        name, number = data.draw(st.sampled_from(self.ever_leased))
        for task_id in TASKS:
            self.find(task_id)
        reply = self.machine.result(result_for(name, number, termination), self.now)
        self.save()
        for held in self.held.values():
            held.discard((name, number))
        if reply.accepted:
            self.accepted.setdefault(name, set()).add(number)
            assert reply.winner == number

    # Receivers

    @precondition(lambda self: self.sent)
    @rule(acknowledges=st.booleans())
    def callback(self, acknowledges: bool) -> None:
        delivery = self.sent.pop(0)
        if acknowledges:
            if delivery.state is DeliveryState.PENDING:
                self.acknowledged.add(delivery.delivery_id)
            self.machine.owed.delivered(delivery)
        else:
            self.machine.owed.not_delivered(delivery, "500", self.now)
        self.save()

    # Time

    @rule(seconds=st.sampled_from([0.5, 1.0, 5.0, 14.0, 1000.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.machine.tick(self.now)
        self.save()

    @rule()
    def long_quiet(self) -> None:
        for _ in range(int(2 * LEASE)):
            self.now += 1.0
            self.machine.tick(self.now)
        self.save()

    # What always holds

    @invariant()
    def one_result_a_session(self) -> None:
        for name, winners in self.accepted.items():
            assert len(winners) == 1
            session = self.machine.sessions.get(name)
            assert session is None or session.winner in winners

    @invariant()
    def an_end_is_an_end(self) -> None:
        for session in self.machine.sessions.values():
            if session.session_id in self.ended:
                assert (session.status, session.winner) == self.ended[session.session_id]
            elif session.status.terminal:
                assert session.termination is not None
                self.ended[session.session_id] = (session.status, session.winner)

    @invariant()
    def no_session_is_leased_twice_or_lost(self) -> None:
        for session in self.machine.sessions.values():
            task = self.machine.tasks[session.task_id]
            leased = [attempt for attempt in session.attempts if attempt.state is AttemptState.LEASED]
            assert len(leased) <= (0 if session.status.terminal else 1)
            assert len(session.attempts) <= task.max_attempts
            if leased:
                assert session.status is not SessionStatus.REGISTERED
            if session.queued:
                assert session in task.queue
                assert task.offered

    @invariant()
    def tasks_end_with_their_sessions(self) -> None:
        for task in self.machine.tasks.values():
            over = [session.status.terminal for session in task.sessions]
            assert task.completed_sessions == sum(over)
            assert task.status.terminal == all(over)
            if task.status is TaskState.COMPLETED:
                assert any(session.traces is not None for session in task.sessions)

    @invariant()
    def callbacks_are_owed(self) -> None:
        for task in self.machine.tasks.values():
            assert (task.delivery is not None) == task.status.terminal
            if task.delivery is None:
                continue
            state, name = task.delivery.state, task.delivery.delivery_id
            assert (state is DeliveryState.DELIVERED) == (name in self.acknowledged)
            if state is DeliveryState.EXPIRED:
                assert self.owed[name] <= self.now

    def teardown(self) -> None:
        """Left alone with one good gateway, everything comes to an end."""
        for _ in range(60):
            self.epochs["a"] += 1
            self.held["a"].clear()
            self.poll("a", True)
            self.work("a", 3, True)
            for name, number in list(self.held["a"]):
                self.machine.result(result_for(name, number, Termination.DONE), self.now)
            self.long_quiet()
            while self.sent:
                self.callback(True)
        for task in self.machine.tasks.values():
            assert task.over, task
        self.disk.close()


Anything.TestCase.settings = settings(max_examples=150, stateful_step_count=40, phases=[Phase.generate])
test_any_order_of_events = Anything.TestCase


def scene(attempts: int = 2, samples: int = 1, **fields: Any) -> tuple[Machine, Task]:
    """A task, and the gateways a and b, of which a has taken the first session."""
    machine = Machine(LEASE, DELIVERY)
    task = new_task(request_for("one", samples, attempts, None, None).model_copy(update=fields), 0.0, 0.0)
    machine.submit(task)
    machine.admit(task)
    for node in ("a", "b"):
        poll(machine, node)
    take(machine, "a", 0.0)
    return machine, task


def poll(
    machine: Machine, node: str, now: float = 0.0, epoch: int = 1, held: tuple[str, int] | None = None
) -> list[str]:
    """Why it must let go of what it holds."""
    names = [] if held is None else [Held(session_id=held[0], attempt=held[1], stage=SessionStatus.RUNNING)]
    return [cancel.why for cancel in machine.poll(report(node, epoch, names), now, 0.0)]


def take(machine: Machine, node: str, now: float, room: int = 1) -> list[Attempt]:
    machine.ask(node, machine.fleet.nodes[node].epoch, Workers(init=room, run=room, postrun=room), now)
    leases = machine.place(now)
    machine.fleet.nodes[node].asking = None
    return leases


def expire(machine: Machine) -> float:
    """Every lease that nobody renews runs out."""
    for second in range(int(LEASE) + 2):
        machine.tick(float(second))
    return LEASE + 1


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
    done = msgspec.structs.replace(result_for(first.session_id, 1, Termination.DONE), traces=[one_trace()])
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


def test_priority_first_then_a_session_from_each_task_in_turn() -> None:
    machine = Machine(LEASE, DELIVERY)
    for task_id, priority in (("big", 0), ("small", 0), ("urgent", 9)):
        request = request_for(task_id, 3, 1, None, None).model_copy(update={"dispatch_priority": priority})
        task = new_task(request, 0.0, 0.0)
        machine.submit(task)
        machine.admit(task)
    poll(machine, "a")
    order = [machine.sessions[attempt.session_id].task_id for attempt in take(machine, "a", 0.0, room=7)]
    assert order == ["urgent", "urgent", "urgent", "big", "small", "big", "small"]


def test_sessions_spread_over_the_nodes_that_ask() -> None:
    machine = Machine(LEASE, DELIVERY)
    task = new_task(request_for("one", 6, 1, None, None), 0.0, 0.0)
    machine.submit(task)
    machine.admit(task)
    for node in NODES:
        poll(machine, node)
        machine.ask(node, 1, Workers(init=4, run=4, postrun=4), 0.0)
    assert Counter(attempt.node_id for attempt in machine.place(0.0)) == {"a": 2, "b": 2, "c": 2}


def test_no_lease_goes_to_a_node_that_cannot_carry_it_out() -> None:
    machine = Machine(LEASE, DELIVERY)
    task = new_task(request_for("one", 1, 1, None, None), 0.0, 0.0)
    machine.submit(task)
    machine.admit(task)
    ill = EngineState(kind="scripted", healthy=False, problem="it does not answer")
    for engine, harnesses in ((ill, ["mini_swe_agent"]), (ENGINE, ["shell"])):
        machine.poll(msgspec.structs.replace(report("a", 1, []), engine=engine, harnesses=harnesses), 0.0, 0.0)
        assert take(machine, "a", 0.0) == []
    poll(machine, "a")
    machine.fleet.drain(machine.fleet.nodes["a"])
    assert take(machine, "a", 0.0) == []
    assert [order.kind for order in machine.fleet.nodes["a"].orders] == ["drain"]
    poll(machine, "a", epoch=2)
    assert len(take(machine, "a", 0.0)) == 1


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
