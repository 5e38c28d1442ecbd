"""What a gateway and the rollout server say to each other (msgpack over HTTP, with the control token).

(session_id, attempt) is the fencing token: leases, cancellations, logs and results carry both.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from polar.records import (
    CallCounts,
    EvaluationResult,
    GatewayMetrics,
    Resources,
    SessionStatus,
    SessionTiming,
    Termination,
    TokenLedger,
    Trace,
    Whole,
)

POLL_SECONDS = 5.0
WORK_WAIT_SECONDS = 25.0


class Workers(msgspec.Struct, kw_only=True):
    """Sizes of the stage pools; as `room`, how many more sessions each takes now."""

    init: Whole
    run: Whole
    postrun: Whole


class EngineState(msgspec.Struct, kw_only=True):
    kind: str
    healthy: bool
    version: str | None = None
    model: str | None = None
    problem: str | None = None


class Held(msgspec.Struct, kw_only=True):
    session_id: str
    attempt: Whole
    stage: SessionStatus
    sampled_tokens: Whole = 0


class PollRequest(msgspec.Struct, kw_only=True):
    node_id: str
    epoch: Whole
    gateway_url: str
    workers: Workers
    room: Workers
    metrics: GatewayMetrics
    engine: EngineState
    resources: Resources = Resources()
    labels: dict[str, str] = {}
    runtimes: list[str] = []
    harnesses: list[str] = []
    held: list[Held] = []
    acked: list[str] = []
    heartbeat_interval_seconds: Annotated[float, msgspec.Meta(gt=0, le=3600)] = POLL_SECONDS


class Lease(msgspec.Struct, kw_only=True):
    """`key` names its attempt: an orphaned sandbox cannot write into its successor's log. `task` is a TaskRequest.
    `queued_seconds`: how long the session has waited, pauses apart; two machines' clocks need not agree on when."""

    session_id: str
    session_index: int
    attempt: int
    key: str
    lease_seconds: float
    queued_seconds: float
    task: dict[str, Any]


class Cancel(msgspec.Struct, kw_only=True):
    session_id: str
    attempt: int
    why: Literal["cancelled", "early_stop", "lost"]


class Order(msgspec.Struct, kw_only=True):
    id: str
    kind: Literal["pause", "resume", "drain"]
    mode: Literal["drain", "abort"] = "drain"
    timeout_seconds: float = 300.0


class PollReply(msgspec.Struct, kw_only=True):
    epoch: int
    leases: list[Lease] = []
    cancels: list[Cancel] = []
    orders: list[Order] = []


class WorkRequest(msgspec.Struct, kw_only=True):
    node_id: str
    epoch: Whole
    room: Workers


class WorkReply(msgspec.Struct, kw_only=True):
    """Cancels and orders come here once, so that they are quick; polls repeat them until they are obeyed."""

    leases: list[Lease] = []
    cancels: list[Cancel] = []
    orders: list[Order] = []


GATEWAY_STOPPED = "gateway_stopped"
"""the fault of an attempt that an orderly stop of its gateway ended: the next one is not counted as another try"""


class NodeResult(msgspec.Struct, kw_only=True):
    """How an attempt ended. `public.session_result` makes the public SessionResult of it."""

    session_id: str
    attempt: Whole
    node_id: str
    epoch: Whole
    status: SessionStatus
    termination: Termination
    retryable: bool = False
    """an infrastructure fault: the server decides whether there is another attempt"""
    fault: str | None = None
    error: str | None = None
    exit_code: int | None = None
    traces: list[Trace] | None = None
    """None where nothing was built"""
    run_termination: Termination | None = None
    """what RUN ended with, kept also where a later stage gives the session its name"""
    tokens: TokenLedger | None = None
    calls: CallCounts | None = None
    evaluation: EvaluationResult | None = None
    evaluator: str | None = None
    timing: SessionTiming = msgspec.field(default_factory=SessionTiming)
    sampled_tokens: Whole = 0
    """that the engine handed over in this attempt, whether or not something was built of them"""
    harness_log: str = ""
    """the last lines the harness printed"""
    log_sha256: str | None = None
    """of the packed log; None where the attempt never opened one"""


class ResultReply(msgspec.Struct, kw_only=True):
    accepted: bool
    winner: int | None = None


class Uploaded(msgspec.Struct, kw_only=True):
    """Reply to a log upload: how many bytes stand; the gateway goes on from there."""

    size: int
