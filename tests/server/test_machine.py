"""Any order of events: one accepted result a session, none lost, none leased twice, no node overbooked, every callback
owed until it is acknowledged or out of time; also when the server dies between an event and its saving, starts anew
from what it saved, and when its clock jumps. Times are long, so that a day has few ticks."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.server.machines import one_trace, report, request_for, result_for, save, start_from

from polar.nodeapi import GATEWAY_STOPPED, Held, Order, Workers
from polar.records import EvaluationResult, Resources, SessionStatus, TaskState, Termination
from polar.server.fleet import StaleEpoch
from polar.server.machine import Machine
from polar.server.needs import NOTHING
from polar.server.state import AttemptState, Delivery, DeliveryState, Task
from polar.server.submission import new_task
from polar.server.tables import Tables

HOUR = 3600.0
LEASE, DELIVERY, PAUSE = 6 * HOUR, 20 * HOUR, 4 * HOUR
NODES = ["a", "b", "c"]
TASKS = ["one", "two", "three"]
LABELS = {"a": {"fast": "yes"}, "b": {}, "c": {"fast": "yes", "big": "yes"}}
SELDOM = st.sampled_from([False, False, False, False, False, True])
Lease = tuple[str, int]


class Anything(RuleBasedStateMachine):
    """The surroundings of a machine: gateways with their own ideas of what they hold, receivers, and a disk."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = Tables(":memory:")
        self.machine = Machine(LEASE, DELIVERY)
        self.now = self.clock = self.paused_until = 0.0
        self.orders = 0
        self.epochs = dict.fromkeys(NODES, 1)
        self.cpus = {"a": 2, "b": 1, "c": 4}
        self.held: dict[str, set[Lease]] = {node: set() for node in NODES}
        self.told: dict[str, set[str]] = {node: set() for node in NODES}
        self.acks: dict[str, list[str]] = {node: [] for node in NODES}
        self.ever_leased: list[Lease] = []
        self.ended: dict[str, tuple[Any, ...]] = {}
        self.over: dict[str, tuple[Any, ...]] = {}
        self.accepted: dict[str, set[int]] = {}
        self.owed: dict[str, float] = {}
        self.acknowledged: set[str] = set()
        self.sent: list[Delivery] = []

    # The disk

    def saved(self, dies: bool = False) -> bool:
        """False: kill -9 came between the event and its saving, so that nobody has heard of it."""
        if dies:
            self.restart()
            return False
        self.owed |= {row.delivery_id: row.deadline for row in self.machine.dirty.values() if isinstance(row, Delivery)}
        save(self.machine, self.disk, self.now)
        self.sent += self.machine.owed.due
        self.machine.owed.due.clear()
        return True

    def restart(self) -> None:
        """kill -9, and a start from the rows alone."""
        self.machine = start_from(self.disk, LEASE, DELIVERY)
        self.sent = []
        assert self.disk.uptime() == self.now
        self.saved()

    def put_away(self) -> None:
        for task in [task for task in self.machine.tasks.values() if task.over]:
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
            self.poll(node, False)
        self.submit("one", 3, 3, 1, None, 0, 1.0, None, False, False)
        self.work("a", 1, False, False)
        self.work("c", 1, False, False)

    @rule(
        task_id=st.sampled_from(TASKS),
        samples=st.integers(1, 3),
        attempts=st.integers(1, 3),
        enough=st.none() | st.integers(1, 3),
        queue=st.none() | st.just(10 * HOUR),
        priority=st.sampled_from([0, 5]),
        cpus=st.sampled_from([None, 0.1, 1.0, 2.0, 3.0]),
        label=st.sampled_from([None, None, "fast", "big"]),
        fresh=st.booleans(),
        dies=SELDOM,
    )
    def submit(
        self,
        task_id: str,
        samples: int,
        attempts: int,
        enough: int | None,
        queue: float | None,
        priority: int,
        cpus: float | None,
        label: str | None,
        fresh: bool,
        dies: bool,
    ) -> None:
        if self.find(task_id) is not None:
            return
        fields: dict[str, Any] = {
            "early_stop_min_usable_sessions": None if enough is None else min(enough, samples),
            "budgets": {"queue": queue},
            "dispatch_priority": priority,
            "runtime": {"cpus": cpus},
            "node_labels": {label: "yes"} if label else {},
            "evaluator": {"strategy": "session_completed", "refresh_runtime": fresh},
        }
        request = request_for(task_id, samples, attempts, **fields)
        task = new_task(request, self.machine.queue_clock(self.now), 0.0)
        self.machine.submit(task)
        if self.saved(dies):
            self.machine.admit(task)
            self.saved()

    @rule(task_id=st.sampled_from(TASKS))
    def cancel(self, task_id: str) -> None:
        task = self.find(task_id)
        if task is not None:
            self.machine.cancel(task, self.now)
            self.saved()

    @rule(task_id=st.sampled_from(TASKS), url=st.sampled_from(["first", "second"]))
    def redirect(self, task_id: str, url: str) -> None:
        task = self.find(task_id)
        if task is None:
            return
        before = task.delivery
        self.machine.redirect(task, f"http://127.0.0.1:9/{url}", self.now)
        if before is not None and before is not task.delivery:
            assert task.delivery is not None
            self.acknowledged.discard(task.delivery.delivery_id)
        self.saved()
        if before is not None and before is not task.delivery:
            self.owed[before.delivery_id] = float("-inf")

    @rule(kind=st.sampled_from(["pause", "resume"]))
    def order(self, kind: Any) -> None:
        self.orders += 1
        self.machine.fleet.order(Order(id=f"{kind}{self.orders}", kind=kind, timeout_seconds=PAUSE), self.now)
        self.paused_until = self.now + PAUSE if kind == "pause" else 0.0
        self.saved()

    # Gateways

    @rule(node=st.sampled_from(NODES), lost=SELDOM)
    def poll(self, node: str, lost: bool) -> None:
        """`lost`: the reply does not arrive."""
        held = [
            Held(session_id=name, attempt=number, stage=SessionStatus.RUNNING)
            for name, number in sorted(self.held[node])
        ]
        facts = {"resources": Resources(cpus=self.cpus[node]), "labels": LABELS[node], "acked": self.acks[node]}
        request = report(node, self.epochs[node], held, heartbeat_interval_seconds=HOUR, **facts)
        cancels = self.machine.poll(request, self.now, 0.0)
        again = self.machine.unheard(self.machine.fleet.nodes[node], self.now)
        orders = self.machine.fleet.nodes[node].orders
        self.saved()
        pause = self.machine.fleet.pause
        if self.machine.fleet.paused(self.now):
            assert pause.order_id in {order.id for order in orders} | self.told[node]
            assert all(order.timeout_seconds == pause.until - self.now for order in orders if order.kind == "pause")
        if not lost:
            self.held[node] -= {(cancel.session_id, cancel.attempt) for cancel in cancels if cancel.why == "lost"}
            self.held[node] |= {(attempt.session_id, attempt.number) for attempt in again}
            self.acks[node] = [order.id for order in orders]
            self.told[node] |= set(self.acks[node])

    @rule(node=st.sampled_from(NODES), room=st.integers(1, 3), lost=SELDOM, dies=SELDOM)
    def work(self, node: str, room: int, lost: bool, dies: bool) -> None:
        asked = self.machine.ask(node, self.epochs[node], Workers(init=room, run=room, postrun=room), self.now)
        leases = self.machine.place(self.now)
        assert len(leases) <= (room if asked is not None else 0)
        if not self.saved(dies):
            return
        for attempt in leases:
            assert attempt.node_id == node
            task = self.machine.tasks[self.machine.sessions[attempt.session_id].task_id]
            assert all(LABELS[node].get(name) == value for name, value in task.needs.labels)
            assert (attempt.session_id, attempt.number) not in self.ever_leased
            self.ever_leased.append((attempt.session_id, attempt.number))
            if not lost:
                self.held[node].add((attempt.session_id, attempt.number))
        if asked is not None:
            asked.asking, asked.cancels = None, []

    @rule(node=st.sampled_from(NODES), cpus=st.integers(1, 6))
    def gateway_dies(self, node: str, cpus: int) -> None:
        self.epochs[node] += 1
        self.cpus[node] = cpus
        self.held[node].clear()
        self.told[node].clear()
        self.acks[node] = []

    def drain(self, node: str) -> None:
        known = self.machine.fleet.nodes.get(node)
        if known is not None:
            self.machine.fleet.drain(known)
            self.saved()
            assert known.epoch < self.epochs[node] or not self.leases_of(node)

    def leases_of(self, node: str) -> list[str]:
        """What a drained node gets when it asks."""
        self.machine.ask(node, self.epochs[node], Workers(init=3, run=3, postrun=3), self.now)
        leases = self.machine.place(self.now)
        self.machine.fleet.nodes[node].asking = None
        return [attempt.session_id for attempt in leases]

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
        usable=st.booleans(),
        stopped=SELDOM,
        dies=SELDOM,
    )
    def result(self, data: st.DataObject, termination: Termination, usable: bool, stopped: bool, dies: bool) -> None:
        """Of any attempt there ever was: first, second, late, of a lost attempt. A gateway repeats one that was not
        answered."""
        name, number = data.draw(st.sampled_from(self.ever_leased[-5:]))
        for task_id in TASKS:
            self.find(task_id)
        ended = result_for(name, number, termination)
        if termination is Termination.DONE and usable:
            ended.traces, ended.evaluation = [one_trace()], EvaluationResult(outcome_reward=1.0)
        if termination is Termination.INFRASTRUCTURE and stopped:
            ended.fault = GATEWAY_STOPPED
        reply = self.machine.result(ended, self.now)
        if not self.saved(dies):
            return
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
        self.saved()

    # Time

    def pass_time(self, seconds: float) -> None:
        away = seconds > LEASE / 2
        if not away:
            self.clock += max(0.0, self.now + seconds - max(self.now, self.paused_until))
        self.now += seconds
        self.machine.tick(self.now)
        self.saved()

    @rule(seconds=st.sampled_from([1.0, HOUR, 3 * HOUR, 5 * HOUR, 1000 * HOUR]))
    def wait(self, seconds: float) -> None:
        self.pass_time(seconds)

    def long_quiet(self) -> None:
        for _ in range(7):
            self.pass_time(2 * HOUR)

    def a_day_of_silence(self) -> None:
        """Gateways that nobody has heard of for so long are forgotten."""
        for _ in range(14):
            self.pass_time(2 * HOUR)
        assert not self.machine.fleet.nodes

    @rule(node=st.sampled_from(NODES), what=st.integers(0, 4))
    def upheaval(self, node: str, what: int) -> None:
        """What happens seldom."""
        match what:
            case 0:
                self.restart()
            case 1:
                self.put_away()
            case 2:
                self.drain(node)
            case 3:
                self.old_gateway_polls(node)
            case _:
                self.a_day_of_silence()

    @rule(node=st.sampled_from(NODES), other=st.sampled_from(NODES))
    def lost_and_leased_again(self, node: str, other: str) -> None:
        """All leases run out while `node` cannot be heard, and `other` takes what it can."""
        self.long_quiet()
        self.poll(other, False)
        self.work(other, 3, False, False)

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
            if session.status.terminal:
                assert session.termination is not None
                end = (session.status, session.winner, session.termination)
                task = self.machine.tasks[session.task_id]
                if session.session_id not in self.ended and session.termination is Termination.QUEUE:
                    assert task.queue_seconds is not None
                    assert self.clock - session.queued_at >= task.queue_seconds - 1e-3
                assert self.ended.setdefault(session.session_id, end) == end
        for task in self.machine.tasks.values():
            if task.status.terminal:
                end = (task.status, task.completed_sessions, task.errored_sessions, task.mean_traces, task.error)
                assert self.over.setdefault(task.task_id, end) == end

    @invariant()
    def no_session_is_leased_twice_or_lost(self) -> None:
        for session in self.machine.sessions.values():
            task = self.machine.tasks[session.task_id]
            assert [attempt.number for attempt in session.attempts] == [*range(1, len(session.attempts) + 1)]
            assert sum(attempt.fault != GATEWAY_STOPPED for attempt in session.attempts) <= task.max_attempts
            assert not any(attempt.state is AttemptState.LEASED for attempt in session.attempts[:-1])
            if session.status.terminal:
                assert session.live is None
            elif session.live is not None:
                assert session.status is not SessionStatus.REGISTERED
            else:
                assert task.offered
                assert session in task.queue

    @invariant()
    def no_node_is_overbooked(self) -> None:
        for node in self.machine.fleet.nodes.values():
            leases = [
                (session, session.live)
                for session in self.machine.sessions.values()
                if session.live is not None and session.live.node_id == node.node_id
            ]
            assert node.leases == {session.session_id: live for session, live in leases}
            assert all(live.epoch == node.epoch for _, live in leases)
            needs = [self.machine.tasks[session.task_id].needs.amount for session, _ in leases]
            assert node.reserved == sum(needs, NOTHING)
            assert node.seen_at is None or node.reserved.within(node.total)

    @invariant()
    def every_node_is_saved_and_none_that_is_forgotten(self) -> None:
        fleet = self.machine.fleet
        assert {node.node_id for node in self.disk.nodes()} == set(fleet.nodes)
        known = {session.live.node_id for session in self.machine.sessions.values() if session.live is not None}
        assert known <= set(fleet.nodes)

    @invariant()
    def paused_time_and_absence_are_no_waiting(self) -> None:
        assert self.machine.queue_clock(self.now) == pytest.approx(self.clock)
        assert self.machine.fleet.paused(self.now) == (self.now < self.paused_until)

    @invariant()
    def tasks_end_with_their_sessions(self) -> None:
        for task in self.machine.tasks.values():
            over = [session.status for session in task.sessions if session.status.terminal]
            assert (task.completed_sessions, task.errored_sessions) == (len(over), over.count(SessionStatus.ERROR))
            assert task.status.terminal == (len(over) == task.num_samples)
            if task.enough is not None and sum(session.usable for session in task.sessions) >= task.enough:
                assert all(session.status.terminal or session.stopping for session in task.sessions)
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
            if all(task.over for task in self.machine.tasks.values()):
                break
            self.gateway_dies("c", 6)
            self.poll("c", False)
            self.work("c", 3, False, False)
            for name, number in sorted(self.held["c"]):
                self.machine.result(result_for(name, number, Termination.DONE), self.now)
            self.long_quiet()
            while self.sent:
                self.callback(True)
        for task in self.machine.tasks.values():
            assert task.over, task
        self.disk.close()


Anything.TestCase.settings = settings(max_examples=120, stateful_step_count=50, phases=[Phase.generate])
test_any_order_of_events = Anything.TestCase
