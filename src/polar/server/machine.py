"""Task, session, attempt, lease: what follows from what. No I/O, no clock: `now` is the server's uptime.

Every session ends once; its first complete result is the accepted one, whatever its attempt; it is leased to one
gateway at a time; a gateway's live leases never ask for more than the gateway has.
"""

from __future__ import annotations

from polar.nodeapi import GATEWAY_STOPPED, Cancel, Held, NodeResult, PollRequest, ResultReply, Workers
from polar.records import SessionStatus, TaskState, Termination
from polar.server import scores
from polar.server.alarms import Alarms
from polar.server.fleet import Fleet
from polar.server.leases import Leases
from polar.server.line import Line
from polar.server.owed import Owed
from polar.server.state import Attempt, AttemptState, Node, Refusal, Row, Session, Task, key_of

AWAY_SECONDS = 2.0
"""a server that did not look at its clock for so long, and for half a lease, was away"""


class Machine:
    """Each method is one event. What the surroundings must do gathers in three fields, which they empty:
    `dirty` (rows to save before anything is answered), `owed.due` (callbacks to send) and `events` (for onlookers)."""

    def __init__(self, lease_seconds: float, delivery_seconds: float) -> None:
        self.tasks: dict[str, Task] = {}
        self.sessions: dict[str, Session] = {}
        self.refused: dict[str, float] = {}
        """ids cancelled before they were submitted, and until when that is remembered"""
        self.dirty: dict[tuple[str, str, int], Row] = {}
        self.events: list[tuple[str, dict[str, object]]] = []
        self.fleet = Fleet(self._save)
        self.leases = Leases(self.fleet, lease_seconds, self._save)
        self.owed = Owed(delivery_seconds, self._save)
        self._line = Line()
        self._patience: Alarms[tuple[Session, float]] = Alarms()
        """by the queue clock: a session, and since when it waits"""
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
        """Takes in a task as it was saved; the nodes that hold its leases are known."""
        self._know(task)
        scores.recount(task)
        for session in task.sessions:
            if session.live is not None:
                self.leases.adopt(session.live, task)
            elif session.queued:
                self._wait(session, task)
        self._line.offer(task)
        if task.delivery is not None:
            self.owed.adopt(task.delivery)

    def _know(self, task: Task) -> None:
        self.tasks[task.task_id] = task
        self.sessions |= {session.session_id: session for session in task.sessions}

    def forget(self, task: Task) -> None:
        """Puts away a task that is over and saved, or that could not be saved at all."""
        self.tasks.pop(task.task_id, None)
        self.dirty.pop(key_of(task), None)
        for session in task.sessions:
            self.dirty.pop(key_of(session), None)
            self.sessions.pop(session.session_id, None)

    def redirect(self, task: Task, url: str | None, now: float) -> None:
        """A resubmission: another callback_url replaces the one there was, and the result is delivered again."""
        if url is None or url == task.callback_url:
            return
        task.callback_url = url
        self._save(task)
        if task.status.terminal:
            self.owed.owe(task, now)

    def cancel(self, task: Task, now: float) -> None:
        if task.status.terminal or task.status is TaskState.CANCELLING:
            return
        task.status = TaskState.CANCELLING
        self._save(task)
        self._stop(task, Termination.CANCELLED, now)

    def refuse(self, task_id: str, until: float) -> None:
        """Cancels a task that is not here yet."""
        self.refused[task_id] = until
        self._save(Refusal(task_id=task_id, until=until))

    # Gateways

    def poll(self, request: PollRequest, now: float, wall: float) -> list[Cancel]:
        """Renews what the node holds; returns what it must not go on with. Raises StaleEpoch."""
        known = self.fleet.nodes.get(request.node_id)
        before = known.abilities if known is not None else None
        node, anew = self.fleet.hear(request, now, wall)
        for attempt in list(node.leases.values()) if anew else ():
            self._lose(attempt, "gateway_restarted", now)
        if node.abilities != before:
            self._line.look_at(node)
        return [cancel for held in request.held if (cancel := self._renew(node, held, now)) is not None]

    def ask(self, node_id: str, epoch: int, room: Workers, now: float) -> Node | None:
        """The node holds a request for work open. None: it has to poll first. Raises StaleEpoch."""
        node = self.fleet.ask(node_id, epoch, room, now)
        if node is not None:
            self._line.look_at(node)
        return node

    def unheard(self, node: Node, now: float) -> list[Attempt]:
        """Leases whose reply seems to have been lost: two heartbeats old, and in no poll of the node yet."""
        patience = 2 * node.heartbeat_interval_seconds
        return [
            attempt
            for attempt in node.leases.values()
            if not attempt.seen
            and now - attempt.leased_at > patience
            and self.sessions[attempt.session_id].stopping is None
        ]

    def place(self, now: float) -> list[Attempt]:
        """Leases waiting sessions to the nodes that ask."""
        matches = self._line.matches(self.fleet.nodes.values(), now)
        return [self._lease(session, node, now) for session, node in matches]

    def result(self, result: NodeResult, now: float) -> ResultReply:
        """An attempt has ended, perhaps for the second time, perhaps long after it was given up."""
        if result.fault == GATEWAY_STOPPED:
            self.fleet.leaves(result.node_id, result.epoch)
        session = self.sessions.get(result.session_id)
        attempt = session.attempt(result.attempt) if session is not None else None
        if session is None or attempt is None:
            return ResultReply(accepted=False)
        if session.status.terminal:
            if attempt.state not in (AttemptState.WON, AttemptState.FAULTED):
                self._end_attempt(attempt, AttemptState.LATE, result)
            return ResultReply(accepted=session.winner == attempt.number, winner=session.winner)
        goes_on = session.stopping is not None or result.fault == GATEWAY_STOPPED
        if result.retryable and (goes_on or not self._is_last(session, attempt)):
            self._fault(session, attempt, result, now)
            return ResultReply(accepted=False)
        self._accept(session, attempt, result, now)
        return ResultReply(accepted=True, winner=attempt.number)

    def stored(self, session: Session, attempt: int, size: int) -> None:
        """So many bytes of the attempt are on the server's disk."""
        row = session.attempts[attempt - 1]
        row.bytes = size
        self._save(row)

    # Time

    def queue_clock(self, now: float) -> float:
        """Stands still while inference is paused, and while the server is away."""
        return self.fleet.pause.clock(now)

    def restart(self, now: float) -> None:
        """The server starts from what it had saved: nobody is blamed for that time, every lease has a fresh term."""
        self.fleet.restart(now)
        self.leases.renew_all(now)
        self._ticked = now

    def tick(self, now: float) -> None:
        if now - self._ticked > max(self.leases.seconds / 2, AWAY_SECONDS):
            self.fleet.stand_still(self._ticked, now)
            self.leases.renew_all(now)
        self._ticked = now
        self.fleet.tick(now)
        for attempt in self.leases.expired(now):
            self._lose(attempt, "gateway_lost", now)
        for session, since in self._patience.due(self.queue_clock(now)):
            self._check_queue_budget(session, since, now)
        self.owed.tick(now)
        self._line.hold(self.fleet.live(now), now)
        self.refused = {task_id: until for task_id, until in self.refused.items() if until > now}

    # Attempts

    def _renew(self, node: Node, held: Held, now: float) -> Cancel | None:
        session = self.sessions.get(held.session_id)
        attempt = session.attempt(held.attempt) if session is not None else None
        if session is None or attempt is None or attempt.node_id != node.node_id or attempt.epoch != node.epoch:
            return Cancel(session_id=held.session_id, attempt=held.attempt, why="lost")
        if attempt.state is AttemptState.LOST:
            self._take_back(session, attempt, node)
        if attempt.state is not AttemptState.LEASED:
            return Cancel(session_id=held.session_id, attempt=held.attempt, why="lost")
        self.leases.renew(attempt, now)
        attempt.sampled_tokens = max(attempt.sampled_tokens, held.sampled_tokens)
        self._enter(session, held.stage)
        return _cancel(session, attempt) if session.stopping is not None else None

    def _take_back(self, session: Session, attempt: Attempt, node: Node) -> None:
        """A lost attempt that its node still has goes on, where no other has begun and there is still room for it."""
        task = self.tasks[session.task_id]
        if session.queued and attempt is session.attempts[-1] and task.needs.amount.within(node.free):
            attempt.fault = None
            self._move(attempt, AttemptState.LEASED)
            self._save(session)

    def _lease(self, session: Session, node: Node, now: float) -> Attempt:
        attempt = self.leases.begin(session, node, self.tasks[session.task_id], now)
        self._save(session)
        self._enter(session, SessionStatus.INITIALIZING)
        return attempt

    def _move(self, attempt: Attempt, state: AttemptState) -> None:
        task = self.tasks[self.sessions[attempt.session_id].task_id]
        released = self.leases.move(attempt, task, state)
        if released is not None:
            self._line.look_at(released)

    def _lose(self, attempt: Attempt, fault: str, now: float) -> None:
        session = self.sessions[attempt.session_id]
        last = self._is_last(session, attempt)
        attempt.fault = fault
        self._move(attempt, AttemptState.LOST)
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
        counted = sum(each.fault != GATEWAY_STOPPED for each in session.attempts)
        return attempt is session.live and counted >= self.tasks[session.task_id].max_attempts

    def _end_attempt(self, attempt: Attempt, state: AttemptState, result: NodeResult) -> None:
        attempt.fault, attempt.log_sha256 = result.fault, result.log_sha256
        built = result.tokens.sampled if result.tokens is not None else 0
        attempt.sampled_tokens = max(attempt.sampled_tokens, result.sampled_tokens, built)
        self._move(attempt, state)

    def _accept(self, session: Session, attempt: Attempt, result: NodeResult, now: float) -> None:
        rival = session.live
        if rival is not None and rival is not attempt:
            self._move(rival, AttemptState.SUPERSEDED)
            self._tell(rival, Cancel(session_id=rival.session_id, attempt=rival.number, why="lost"))
        self._end_attempt(attempt, AttemptState.WON, result)
        session.winner, session.node_id = attempt.number, attempt.node_id
        scores.note(session, result, graded=self.tasks[session.task_id].graded)
        self._end(session, result.status, result.termination, now)

    def _tell(self, attempt: Attempt, cancel: Cancel) -> None:
        node = self.fleet.nodes.get(attempt.node_id)
        if node is not None and node.epoch == attempt.epoch:
            node.cancels.append(cancel)

    # Sessions

    def _enter(self, session: Session, status: SessionStatus) -> None:
        if status is session.status or (status.terminal and session.live is not None):
            return
        session.status = status
        data: dict[str, object] = {"session_id": session.session_id, "task_id": session.task_id, "status": status.value}
        self.events.append(("session.state_changed", data))

    def _requeue(self, session: Session, now: float) -> None:
        session.queued_at = self.queue_clock(now)
        self._save(session)
        self._enter(session, SessionStatus.REGISTERED)
        task = self.tasks[session.task_id]
        self._wait(session, task)
        self._line.offer(task)

    def _wait(self, session: Session, task: Task) -> None:
        task.queue.append(session)
        if task.queue_seconds is not None:
            self._patience.set(session.queued_at + task.queue_seconds, (session, session.queued_at))

    def _check_queue_budget(self, session: Session, since: float, now: float) -> None:
        if session.queued and session.queued_at == since:
            budget = self.tasks[session.task_id].queue_seconds
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
                self._close(session, SessionStatus.ERROR, why)
        if task.completed_sessions == task.num_samples:
            self._finish(task, now)

    def _end(self, session: Session, status: SessionStatus, termination: Termination, now: float) -> None:
        self._close(session, status, termination)
        task = self.tasks[session.task_id]
        if task.completed_sessions == task.num_samples:
            self._finish(task, now)
        elif task.enough is not None and task.tally.usable >= task.enough:
            self._stop(task, Termination.EARLY_STOP, now)

    def _close(self, session: Session, status: SessionStatus, termination: Termination) -> None:
        session.termination = termination
        self._enter(session, status)
        self._save(session)
        task = self.tasks[session.task_id]
        scores.count(task, session)
        self._save(task)
        self.events.append(("task.updated", {"task_id": task.task_id, "completed_sessions": task.completed_sessions}))

    def _finish(self, task: Task, now: float) -> None:
        if task.status.terminal:
            return
        task.ended_at = now
        if task.status is TaskState.CANCELLING:
            task.status = TaskState.CANCELLED
        elif any(session.traces is not None for session in task.sessions):
            task.status = TaskState.COMPLETED
        else:
            task.status, task.error = TaskState.FAILED, scores.why_failed(task)
        self.events.append(("task.completed", {"task_id": task.task_id, "status": task.status.value}))
        self.owed.owe(task, now)

    def _save(self, row: Row) -> None:
        self.dirty[key_of(row)] = row


def _cancel(session: Session, attempt: Attempt) -> Cancel:
    why = "early_stop" if session.stopping is Termination.EARLY_STOP else "cancelled"
    return Cancel(session_id=session.session_id, attempt=attempt.number, why=why)  # type: ignore[arg-type]
