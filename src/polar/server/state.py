"""What the rollout server knows: one struct a table row, with the few fields beside them that a restart may forget.

Times are seconds of the server's uptime, which goes on where it stood after a restart; `queued_at` alone is by the
queue clock (see Pause); `created_at`, `updated_at` and `last_heartbeat` are wall-clock times, for people.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from enum import StrEnum
from typing import Any

import msgspec

from polar.nodeapi import Cancel, EngineState, Order, Workers
from polar.records import GatewayMetrics, SessionStatus, SessionTiming, TaskState, Termination
from polar.server.needs import NOTHING, Amount, Needs


class AttemptState(StrEnum):
    LEASED = "leased"
    LOST = "lost"
    """its lease ran out, or its gateway started anew"""
    FAULTED = "faulted"
    """an infrastructure fault ended it; there is, or was, another attempt"""
    SUPERSEDED = "superseded"
    """another attempt's result came first"""
    LATE = "late"
    """its result came after another had been accepted: on record, no more"""
    WON = "won"


class Attempt(msgspec.Struct, kw_only=True):
    session_id: str
    number: int
    node_id: str
    epoch: int
    leased_at: float
    expires_at: float
    state: AttemptState = AttemptState.LEASED
    sampled_tokens: int = 0
    fault: str | None = None
    log_sha256: str | None = None
    bytes: int | None = 0
    """its result and its log on disk; None where an older Polar left them, until they have been measured"""
    seen: bool = False
    """the gateway has named it in a poll: the lease arrived"""


class Session(msgspec.Struct, kw_only=True):
    """`winner` None with a terminal status: the server itself ended the session, and there is no result file."""

    session_id: str
    task_id: str
    index: int
    status: SessionStatus = SessionStatus.REGISTERED
    queued_at: float
    termination: Termination | None = None
    fault: str | None = None
    error: str | None = None
    winner: int | None = None
    node_id: str | None = None
    reward: float | None = None
    traces: int | None = None
    """None: no trajectory"""
    completions: int | None = None
    usable: bool = False
    stopping: Termination | None = None
    timing: SessionTiming = msgspec.field(default_factory=SessionTiming)
    attempts: list[Attempt] = []

    @property
    def live(self) -> Attempt | None:
        last = self.attempts[-1] if self.attempts else None
        return last if last is not None and last.state is AttemptState.LEASED else None

    @property
    def queued(self) -> bool:
        return not self.status.terminal and self.live is None

    def attempt(self, number: int) -> Attempt | None:
        return self.attempts[number - 1] if 1 <= number <= len(self.attempts) else None


class DeliveryState(StrEnum):
    PENDING = "pending"
    DELIVERED = "delivered"
    EXPIRED = "expired"


class Delivery(msgspec.Struct, kw_only=True):
    """One callback owed. Its id depends on task and url alone, so the receiver can tell a repeat."""

    delivery_id: str
    task_id: str
    url: str
    due_at: float
    deadline: float
    state: DeliveryState = DeliveryState.PENDING
    tries: int = 0
    error: str | None = None
    sending: bool = False


class Mean(msgspec.Struct):
    """Of what is known; None while nothing is."""

    total: float = 0.0
    number: int = 0

    def add(self, value: float | None) -> float | None:
        if value is not None:
            self.total, self.number = self.total + value, self.number + 1
        return self.total / self.number if self.number else None


class Tally(msgspec.Struct):
    """Over a task's sessions that are over, so that the end of one costs the same in a group of any size."""

    over: int = 0
    errors: int = 0
    usable: int = 0
    rewards: Mean = msgspec.field(default_factory=Mean)
    traces: Mean = msgspec.field(default_factory=Mean)
    completions: Mean = msgspec.field(default_factory=Mean)


class Task(msgspec.Struct, kw_only=True):
    """`request` is the TaskRequest as JSON; `digest` tells a repeat of it from another task of the same id."""

    task_id: str
    digest: str
    request: str
    status: TaskState = TaskState.RUNNING
    priority: int = 0
    max_attempts: int = 2
    queue_seconds: float | None = None
    enough: int | None = None
    runtime: str | None = None
    harness: str
    """the harness's name, or its import path"""
    model: str
    needs: Needs = Needs()
    graded: bool = False
    callback_url: str | None = None
    callback_format: str = "json"
    num_samples: int
    completed_sessions: int = 0
    errored_sessions: int = 0
    mean_reward: float | None = None
    mean_traces: float | None = None
    mean_completions: float | None = None
    created_at: float
    updated_at: float
    ended_at: float | None = None
    source: str | None = None
    error: str | None = None
    sessions: list[Session] = []
    delivery: Delivery | None = None
    tally: Tally = msgspec.field(default_factory=Tally)
    queue: deque[Session] = msgspec.field(default_factory=deque)
    offered: bool = False
    """it stands in the machine's line of tasks with waiting sessions"""

    @property
    def document(self) -> dict[str, Any]:
        """The TaskRequest."""
        document: dict[str, Any] = msgspec.json.decode(self.request)
        return document

    @property
    def over(self) -> bool:
        return self.status.terminal and (self.delivery is None or self.delivery.state is not DeliveryState.PENDING)

    @property
    def rows(self) -> Iterator[Row]:
        """It and what hangs on it."""
        yield self
        for session in self.sessions:
            yield session
            yield from session.attempts
        if self.delivery is not None:
            yield self.delivery


class Refusal(msgspec.Struct, kw_only=True):
    """A task cancelled before it was submitted: the id is refused until then."""

    task_id: str
    until: float


class Pause(msgspec.Struct, kw_only=True):
    """The pause of inference at every gateway, while `order_id` is not None, and the queue clock, which stands still
    meanwhile. One row."""

    id: int = 0
    order_id: str | None = None
    mode: str = "drain"
    began: float = 0.0
    until: float = 0.0
    stood: float = 0.0
    """seconds that the queue clock has stood still before this pause"""

    def clock(self, now: float) -> float:
        paused = min(now, self.until) - self.began if self.order_id is not None else 0.0
        return now - self.stood - paused


class ForgottenNode(msgspec.Struct, kw_only=True):
    """Its row goes."""

    node_id: str


class Node(msgspec.Struct, kw_only=True):
    """`asking` is the room it has left of what it offered in the request for work that it holds open now."""

    node_id: str
    epoch: int
    gateway_url: str
    workers: Workers
    engine: EngineState
    metrics: GatewayMetrics = msgspec.field(default_factory=GatewayMetrics)
    runtimes: list[str] = []
    harnesses: list[str] = []
    heartbeat_interval_seconds: float = 5.0
    draining: bool = False
    last_heartbeat: float = 0.0
    seen_at: float | None = None
    labels: dict[str, str] = {}
    total: Amount = NOTHING
    reserved: Amount = NOTHING
    """what its live leases ask for together"""
    leases: dict[str, Attempt] = {}
    """the live ones by session"""
    asking: Workers | None = None
    cancels: list[Cancel] = []
    orders: list[Order] = []
    untold: list[Order] = []
    """those of `orders` that no reply has carried yet"""

    @property
    def free(self) -> Amount:
        return self.total - self.reserved

    @property
    def abilities(self) -> tuple[object, ...]:
        """What decides which sessions it can take, its room aside."""
        return self.runtimes, self.harnesses, self.labels, self.total, self.engine.healthy, self.epoch

    @property
    def open(self) -> bool:
        """It takes sessions at this moment."""
        return self.asking is not None and self.asking.init > 0 and self.engine.healthy and not self.draining


Row = Task | Session | Attempt | Delivery | Node | ForgottenNode | Pause | Refusal


def key_of(row: Row) -> tuple[str, str, int]:
    """What tells rows apart; a node that comes back takes the place of the word that it is forgotten."""
    match row:
        case Task():
            return ("task", row.task_id, 0)
        case Session():
            return ("session", row.session_id, 0)
        case Attempt():
            return ("attempt", row.session_id, row.number)
        case Delivery():
            return ("delivery", row.delivery_id, 0)
        case Node() | ForgottenNode():
            return ("node", row.node_id, 0)
        case Pause():
            return ("pause", "", 0)
        case Refusal():
            return ("refusal", row.task_id, 0)
