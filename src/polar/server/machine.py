"""Task, session, attempt, lease, delivery: what follows from what. No I/O, no clock: `now` is the server's uptime.

Every session ends once; its first complete result is the accepted one, whatever its attempt; it is leased to one
gateway at a time; a callback is owed until it was acknowledged or its deadline has passed.
"""

from __future__ import annotations

from hashlib import sha256

from polar.nodeapi import Cancel, Held, NodeResult, Order, PollRequest, ResultReply, Workers
from polar.records import SessionStatus, TaskState, Termination
from polar.server import scores
from polar.server.line import Line, live_nodes
from polar.server.state import Attempt, AttemptState, Delivery, DeliveryState, Node, Session, Task

FIRST_WAIT, LONGEST_WAIT = 0.5, 30.0
AWAY_SECONDS = 2.0
"""a server that did not look at its clock for so long, and for half a lease, was away"""
Row = Task | Session | Attempt | Delivery | Node


class StaleEpoch(Exception):
    """A newer gateway has taken this node's name."""


class Machine:
    """Each method is one event. What the surroundings must do gathers in three fields, which they empty:
    `dirty` (rows to save before anything is answered), `due` (callbacks to send) and `events` (for onlookers)."""

    def __init__(self, lease_seconds: float, delivery_seconds: float) -> None:
        self.lease_seconds = lease_seconds
        self.delivery_seconds = delivery_seconds
        self.tasks: dict[str, Task] = {}
        self.sessions: dict[str, Session] = {}
        self.nodes: dict[str, Node] = {}
        self.refused: dict[str, float] = {}
        """ids cancelled before they were submitted, and until when that is remembered"""
        self.dirty: dict[tuple[str, str, int], Row] = {}
        self.due: list[Delivery] = []
        self.events: list[tuple[str, dict[str, object]]] = []
        self._line = Line()
        self._ticked = 0.0

    # Tasks

    def submit(self, task: Task) -> None:
        """Nothing of it is leased before `admit`."""
        self._know(task)
        self._save(task)
        for session in task.sessions:
            self._save(session)

    def admit(self, task: Task) -> None:
        """The new task is on disk: its sessions may be leased."""
        self.adopt(task)
        self.events.append(("task.created", {"task_id": task.task_id, "num_samples": task.num_samples}))

    def adopt(self, task: Task) -> None:
        """Takes in a task as it was saved."""
        self._know(task)
        task.queue.extend(session for session in task.sessions if session.queued)
        self._line.offer(task)

    def _know(self, task: Task) -> None:
        self.tasks[task.task_id] = task
        self.sessions |= {session.session_id: session for session in task.sessions}

    def forget(self, task: Task) -> None:
        """Puts away a task that is over and saved, or that could not be saved at all."""
        self.tasks.pop(task.task_id, None)
        self.dirty.pop(_key(task), None)
        for session in task.sessions:
            self.dirty.pop(_key(session), None)
            self.sessions.pop(session.session_id, None)

    def redirect(self, task: Task, url: str | None, now: float) -> None:
        """A resubmission: another callback_url replaces the one there was, and the result is delivered again."""
        if url is None or url == task.callback_url:
            return
        task.callback_url = url
        self._save(task)
        if task.status.terminal:
            self._owe(task, now)

    def cancel(self, task: Task, now: float) -> None:
        if task.status.terminal or task.status is TaskState.CANCELLING:
            return
        task.status = TaskState.CANCELLING
        self._save(task)
        self._stop(task, Termination.CANCELLED, now)

    # Gateways

    def poll(self, request: PollRequest, now: float, wall: float) -> list[Cancel]:
        """Renews what the node holds; returns what it must not go on with. Raises StaleEpoch."""
        node = self._node(request)
        node.gateway_url, node.workers, node.metrics = request.gateway_url, request.workers, request.metrics
        node.runtimes, node.harnesses, node.engine = request.runtimes, request.harnesses, request.engine
        node.heartbeat_interval_seconds = request.heartbeat_interval_seconds
        node.seen_at, node.last_heartbeat = now, wall
        node.orders = [order for order in node.orders if order.id not in request.acked]
        if request.epoch > node.epoch:
            node.epoch, node.draining, node.asking = request.epoch, False, None
            self._save(node)
            for session, attempt in self._leased(node.node_id):
                self._lose(session, attempt, "gateway_restarted", now)
        node.cancels, node.untold = [], []
        return [cancel for held in request.held if (cancel := self._renew(node, held, now)) is not None]

    def ask(self, node_id: str, epoch: int, room: Workers, now: float) -> Node | None:
        """The node holds a request for work open. None: it has to poll first. Raises StaleEpoch."""
        node = self.nodes.get(node_id)
        if node is None or node.epoch < epoch or node.seen_at is None:
            return None
        if node.epoch > epoch:
            raise StaleEpoch(node_id)
        node.asking = Workers(init=room.init, run=room.run, postrun=room.postrun)
        node.seen_at = now
        return node

    def order(self, order: Order, now: float) -> None:
        """For every connected node, in place of an earlier order to pause or go on."""
        for node in live_nodes(self.nodes.values(), now):
            node.orders = [older for older in node.orders if older.kind == "drain"] + [order]
            node.untold.append(order)

    def drain(self, node: Node) -> None:
        """The node gets no more sessions, until its gateway starts anew."""
        if not node.draining:
            node.draining = True
            order = Order(id=f"drain-{node.node_id}-{node.epoch}", kind="drain")
            node.orders.append(order)
            node.untold.append(order)
            self._save(node)

    def unheard(self, node: Node, now: float) -> list[Attempt]:
        """Leases whose reply seems to have been lost: two heartbeats old, and in no poll of the node yet."""
        patience = 2 * node.heartbeat_interval_seconds
        return [
            attempt
            for session, attempt in self._leased(node.node_id)
            if not attempt.seen and session.stopping is None and now - attempt.leased_at > patience
        ]

    def place(self, now: float) -> list[Attempt]:
        """Leases waiting sessions to the nodes that ask."""
        matches = self._line.matches(self.tasks, self.nodes.values())
        return [self._lease(session, node, now) for session, node in matches]

    def result(self, result: NodeResult, now: float) -> ResultReply:
        """An attempt has ended, perhaps for the second time, perhaps long after it was given up."""
        session = self.sessions.get(result.session_id)
        attempt = session.attempt(result.attempt) if session is not None else None
        if session is None or attempt is None:
            return ResultReply(accepted=False)
        if session.status.terminal:
            if attempt.state not in (AttemptState.WON, AttemptState.FAULTED):
                self._end_attempt(attempt, AttemptState.LATE, result)
            return ResultReply(accepted=session.winner == attempt.number, winner=session.winner)
        if result.retryable and (session.stopping is not None or not self._is_last(session, attempt)):
            self._fault(session, attempt, result, now)
            return ResultReply(accepted=False)
        self._accept(session, attempt, result, now)
        return ResultReply(accepted=True, winner=attempt.number)

    # Time

    def restart(self, now: float) -> None:
        """The server was away: nobody is blamed for that time, every lease has a fresh term."""
        self._ticked = now
        for session in self.sessions.values():
            if session.live is not None:
                session.live.expires_at = now + self.lease_seconds

    def tick(self, now: float) -> None:
        if now - self._ticked > max(self.lease_seconds / 2, AWAY_SECONDS):
            self.restart(now)
        self._ticked = now
        for session in list(self.sessions.values()):
            attempt = session.live
            if attempt is not None and attempt.expires_at <= now:
                self._lose(session, attempt, "gateway_lost", now)
            elif session.queued:
                self._check_queue_budget(session, now)
        for task in self.tasks.values():
            if task.delivery is not None:
                self._check_delivery(task.delivery, now)
        self.refused = {task_id: until for task_id, until in self.refused.items() if until > now}

    # Deliveries

    def delivered(self, delivery: Delivery) -> None:
        if delivery.state is DeliveryState.PENDING:
            delivery.sending, delivery.state, delivery.error = False, DeliveryState.DELIVERED, None
            self._save(delivery)

    def not_delivered(self, delivery: Delivery, why: str, now: float) -> None:
        if delivery.state is not DeliveryState.PENDING:
            return
        delivery.sending, delivery.error = False, why
        delivery.due_at = now + min(FIRST_WAIT * 2**delivery.tries, LONGEST_WAIT)
        delivery.tries = min(delivery.tries + 1, 62)
        self._save(delivery)

    def _check_delivery(self, delivery: Delivery, now: float) -> None:
        if delivery.state is not DeliveryState.PENDING or delivery.sending:
            return
        if delivery.deadline <= now:
            delivery.state = DeliveryState.EXPIRED
            self._save(delivery)
        elif delivery.due_at <= now:
            delivery.sending = True
            self.due.append(delivery)

    def _owe(self, task: Task, now: float) -> None:
        if task.callback_url is None:
            return
        if task.delivery is not None and task.delivery.state is DeliveryState.PENDING:
            task.delivery.state = DeliveryState.EXPIRED
            self._save(task.delivery)
        name = sha256(f"{task.task_id}\n{task.callback_url}".encode()).hexdigest()[:32]
        task.delivery = Delivery(
            delivery_id=name,
            task_id=task.task_id,
            url=task.callback_url,
            due_at=now,
            deadline=now + self.delivery_seconds,
        )
        self._save(task.delivery)
        self._check_delivery(task.delivery, now)

    # Attempts

    def _node(self, request: PollRequest) -> Node:
        node = self.nodes.get(request.node_id)
        if node is None:
            node = self.nodes[request.node_id] = Node(
                node_id=request.node_id,
                epoch=request.epoch,
                gateway_url=request.gateway_url,
                workers=request.workers,
                engine=request.engine,
            )
            self._save(node)
        if request.epoch < node.epoch:
            raise StaleEpoch(request.node_id)
        return node

    def _leased(self, node_id: str) -> list[tuple[Session, Attempt]]:
        pairs = ((session, session.live) for session in self.sessions.values())
        return [(session, live) for session, live in pairs if live is not None and live.node_id == node_id]

    def _renew(self, node: Node, held: Held, now: float) -> Cancel | None:
        session = self.sessions.get(held.session_id)
        attempt = session.attempt(held.attempt) if session is not None else None
        if session is None or attempt is None or attempt.node_id != node.node_id or attempt.epoch != node.epoch:
            return Cancel(session_id=held.session_id, attempt=held.attempt, why="lost")
        if attempt.state is AttemptState.LOST and session.queued and attempt is session.attempts[-1]:
            attempt.state, attempt.fault = AttemptState.LEASED, None
            self._save(attempt)
        if attempt.state is not AttemptState.LEASED:
            return Cancel(session_id=held.session_id, attempt=held.attempt, why="lost")
        attempt.expires_at, attempt.seen = now + self.lease_seconds, True
        attempt.sampled_tokens = max(attempt.sampled_tokens, held.sampled_tokens)
        self._enter(session, held.stage)
        return _cancel(session, attempt) if session.stopping is not None else None

    def _lease(self, session: Session, node: Node, now: float) -> Attempt:
        attempt = Attempt(
            session_id=session.session_id,
            number=len(session.attempts) + 1,
            node_id=node.node_id,
            epoch=node.epoch,
            leased_at=now,
            expires_at=now + self.lease_seconds,
        )
        session.attempts.append(attempt)
        session.node_id = node.node_id
        assert node.asking is not None
        node.asking.init -= 1
        node.asking.run -= 1
        self._save(attempt)
        self._save(session)
        self._enter(session, SessionStatus.INITIALIZING)
        return attempt

    def _lose(self, session: Session, attempt: Attempt, fault: str, now: float) -> None:
        last = self._is_last(session, attempt)
        attempt.state, attempt.fault = AttemptState.LOST, fault
        self._save(attempt)
        session.fault, session.error = fault, f"the gateway {attempt.node_id} was lost ({fault})"
        if last and session.stopping is None:
            self._end(session, SessionStatus.ERROR, Termination.INFRASTRUCTURE, now)
        else:
            self._go_on(session, now)

    def _fault(self, session: Session, attempt: Attempt, result: NodeResult, now: float) -> None:
        was_live = attempt is session.live
        if attempt.state in (AttemptState.LEASED, AttemptState.LOST):
            self._end_attempt(attempt, AttemptState.FAULTED, result)
        if was_live:
            session.fault, session.error = result.fault, result.error
            self._go_on(session, now)

    def _go_on(self, session: Session, now: float) -> None:
        """An attempt came to nothing: the session waits for the next one, or was to stop anyhow."""
        if session.stopping is None:
            self._requeue(session, now)
        else:
            session.fault, session.error = None, None
            self._end(session, SessionStatus.ERROR, session.stopping, now)

    def _is_last(self, session: Session, attempt: Attempt) -> bool:
        return attempt is session.live and attempt.number >= self.tasks[session.task_id].max_attempts

    def _end_attempt(self, attempt: Attempt, state: AttemptState, result: NodeResult) -> None:
        attempt.state, attempt.fault, attempt.log_sha256 = state, result.fault, result.log_sha256
        if result.tokens is not None:
            attempt.sampled_tokens = result.tokens.sampled
        self._save(attempt)

    def _accept(self, session: Session, attempt: Attempt, result: NodeResult, now: float) -> None:
        rival = session.live
        if rival is not None and rival is not attempt:
            rival.state = AttemptState.SUPERSEDED
            self._save(rival)
            self._tell(rival, Cancel(session_id=rival.session_id, attempt=rival.number, why="lost"))
        self._end_attempt(attempt, AttemptState.WON, result)
        session.winner, session.node_id = attempt.number, attempt.node_id
        scores.note(session, result, graded=self.tasks[session.task_id].graded)
        self._end(session, result.status, result.termination, now)

    def _tell(self, attempt: Attempt, cancel: Cancel) -> None:
        node = self.nodes.get(attempt.node_id)
        if node is not None and node.epoch == attempt.epoch:
            node.cancels.append(cancel)

    # Sessions

    def _enter(self, session: Session, status: SessionStatus) -> None:
        if status is session.status or (status.terminal and session.live is not None):
            return
        session.status = status
        self.events.append(("session.state_changed", {"session_id": session.session_id, "status": status.value}))

    def _requeue(self, session: Session, now: float) -> None:
        session.queued_at = now
        self._save(session)
        self._enter(session, SessionStatus.REGISTERED)
        task = self.tasks[session.task_id]
        task.queue.append(session)
        self._line.offer(task)

    def _check_queue_budget(self, session: Session, now: float) -> None:
        budget = self.tasks[session.task_id].queue_seconds
        if budget is not None and now - session.queued_at > budget:
            session.error = f"no gateway took the session within its queue budget of {budget:g} s"
            self._end(session, SessionStatus.TIMEOUT, Termination.QUEUE, now)

    def _stop(self, task: Task, why: Termination, now: float) -> None:
        for session in task.sessions:
            attempt = session.live
            if attempt is not None and session.stopping is None:
                session.stopping = why
                self._save(session)
                self._tell(attempt, _cancel(session, attempt))
            elif session.queued:
                self._end(session, SessionStatus.ERROR, why, now)

    def _end(self, session: Session, status: SessionStatus, termination: Termination, now: float) -> None:
        session.termination = termination
        self._enter(session, status)
        self._save(session)
        task = self.tasks[session.task_id]
        scores.summarize(task)
        self._save(task)
        self.events.append(("task.updated", {"task_id": task.task_id, "completed_sessions": task.completed_sessions}))
        if task.completed_sessions == task.num_samples:
            self._finish(task, now)
        elif task.enough is not None and sum(session.usable for session in task.sessions) >= task.enough:
            self._stop(task, Termination.EARLY_STOP, now)

    def _finish(self, task: Task, now: float) -> None:
        if task.status.terminal:
            return
        if task.status is TaskState.CANCELLING:
            task.status = TaskState.CANCELLED
        elif any(session.traces is not None for session in task.sessions):
            task.status = TaskState.COMPLETED
        else:
            task.status, task.error = TaskState.FAILED, scores.why_failed(task)
        self.events.append(("task.completed", {"task_id": task.task_id, "status": task.status.value}))
        self._owe(task, now)

    def _save(self, row: Row) -> None:
        self.dirty[_key(row)] = row


def _key(row: Row) -> tuple[str, str, int]:
    match row:
        case Task():
            return ("task", row.task_id, 0)
        case Session():
            return ("session", row.session_id, 0)
        case Attempt():
            return ("attempt", row.session_id, row.number)
        case Delivery():
            return ("delivery", row.delivery_id, 0)
        case Node():
            return ("node", row.node_id, 0)


def _cancel(session: Session, attempt: Attempt) -> Cancel:
    why = "early_stop" if session.stopping is Termination.EARLY_STOP else "cancelled"
    return Cancel(session_id=session.session_id, attempt=attempt.number, why=why)  # type: ignore[arg-type]
