"""Any order of events: one accepted result a session, none lost, none leased twice, every callback owed until it is
acknowledged or out of time; also when the server starts anew from what it saved, and when its clock jumps."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from polar.nodeapi import EngineState, Held, NodeResult, PollRequest, Workers
from polar.records import CallCounts, GatewayMetrics, SessionStatus, TaskState, Termination, TokenLedger
from polar.requests import TaskRequest
from polar.server.machine import Machine, StaleEpoch
from polar.server.state import Attempt, AttemptState, Delivery, DeliveryState, Session, Task
from polar.server.submission import new_task
from polar.server.tables import Tables

LEASE, DELIVERY = 30.0, 100.0
NODES = ["a", "b", "c"]
TASKS = ["one", "two", "three"]
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
        self.sent += self.machine.due
        self.machine.due.clear()

    @rule()
    def restart(self) -> None:
        """kill -9, and a start from the rows alone."""
        self.machine = Machine(LEASE, DELIVERY)
        self.machine.nodes = {node.node_id: node for node in self.disk.nodes()}
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
        report = PollRequest(
            node_id=node,
            epoch=self.epochs[node],
            gateway_url="",
            workers=Workers(init=2, run=2, postrun=2),
            room=Workers(init=0, run=0, postrun=0),
            metrics=GatewayMetrics(),
            engine=ENGINE,
            harnesses=["mini_swe_agent"],
            held=held,
        )
        cancels = self.machine.poll(report, self.now, 0.0)
        again = self.machine.unheard(self.machine.nodes[node], self.now)
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

    @precondition(lambda self: self.machine.nodes)
    @rule(node=st.sampled_from(NODES))
    def old_gateway_polls(self, node: str) -> None:
        known = self.machine.nodes.get(node)
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
            self.machine.delivered(delivery)
            self.acknowledged.add(delivery.delivery_id)
        else:
            self.machine.not_delivered(delivery, "500", self.now)
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
            assert task.over
        self.disk.close()


Anything.TestCase.settings = settings(max_examples=120, stateful_step_count=40)
test_any_order_of_events = Anything.TestCase


def leased(machine: Machine, task_id: str = "one", attempts: int = 2) -> tuple[Session, Attempt]:
    task = new_task(request_for(task_id, 1, attempts, None, None), 0.0, 0.0)
    machine.submit(task)
    machine.admit(task)
    poll(machine, "a")
    machine.ask("a", 1, Workers(init=1, run=1, postrun=1), 0.0)
    return task.sessions[0], machine.place(0.0)[0]


def poll(machine: Machine, node: str, epoch: int = 1, held: list[Held] | None = None, now: float = 0.0) -> None:
    report = PollRequest(
        node_id=node,
        epoch=epoch,
        gateway_url="",
        workers=Workers(init=2, run=2, postrun=2),
        room=Workers(init=0, run=0, postrun=0),
        metrics=GatewayMetrics(),
        engine=ENGINE,
        harnesses=["mini_swe_agent"],
        held=held or [],
    )
    machine.poll(report, now, 0.0)
