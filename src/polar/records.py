"""What Polar hands out and stores, with every enum that decides a gradient.

Token data is numpy in memory (int32 ids, float32 logprobs, uint8 mask), a packed extension type in msgpack,
and lists of numbers in JSON. Field names are the public API's names.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
import numpy as np

Whole = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""what every store of the house can hold"""


class SessionStatus(StrEnum):
    REGISTERED = "REGISTERED"
    INITIALIZING = "INITIALIZING"
    READY = "READY"
    RUNNING = "RUNNING"
    POST_RUN = "POST_RUN"
    BUILDING = "BUILDING"
    EVALUATING = "EVALUATING"
    COMPLETED = "COMPLETED"
    ERROR = "ERROR"
    TIMEOUT = "TIMEOUT"

    @property
    def terminal(self) -> bool:
        return self in (SessionStatus.COMPLETED, SessionStatus.ERROR, SessionStatus.TIMEOUT)


class TaskState(StrEnum):
    """`status` of a task."""

    RUNNING = "running"
    COMPLETED = "completed"
    FAILED = "failed"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        return self in (TaskState.COMPLETED, TaskState.FAILED, TaskState.CANCELLED)


class Termination(StrEnum):
    """Why a session ended: one row each of `endings.TABLE`. A fault's own name may refine INFRASTRUCTURE."""

    QUEUE = "queue"
    SANDBOX_START = "sandbox_start"
    PREPARE = "prepare"
    BUILD = "build"
    DONE = "done"
    HARNESS_EXIT = "harness_exit"
    LIMIT = "limit"
    CONTEXT = "context"
    AGENT_TIMEOUT = "agent_timeout"
    NO_CALLS = "no_calls"
    SANDBOX_LIMIT = "sandbox_limit"
    INFRASTRUCTURE = "infrastructure"
    EVALUATION = "evaluation"
    CANCELLED = "cancelled"
    EARLY_STOP = "early_stop"


class Exclusion(StrEnum):
    """Why a sampled token is in no trace as a trainable one (law of conservation)."""

    AUXILIARY_CALL = "auxiliary_call"
    """a call of the harness's small helper model"""
    UNDELIVERED = "undelivered"
    """the answer never reached the harness, and nothing continued from it"""
    ABORTED = "aborted"
    """the call was cut off: end of the session, client gone, engine lost half-way"""
    OVER_LIMIT = "over_limit"
    """sampled after a limit of the session had been reached"""
    CONSTRAINED = "constrained"
    """sampled under a grammar (structured output, a forced tool call), a penalty or a bias: the logprobs are of a
    distribution that a trainer cannot compute again"""
    IMAGES = "images"
    """its context has images, of which the ids that a trainer gets have only the place"""
    UNKNOWN_CONTEXT = "unknown_context"
    """the engine gave ids of its answer, but never said which prompt ids it had"""


class LogprobMode(StrEnum):
    """Of which distribution an engine's logprobs are."""

    SAMPLING_TEMPERATURE = "sampling_temperature"
    """at the call's temperature, before top_p, top_k and min_p: what a trainer computes"""
    PROCESSED = "processed"
    """as it was sampled from: behind top_p, top_k and min_p as well"""
    RAW = "raw"
    """at temperature 1, whatever the call's"""


class Drop(StrEnum):
    """Why the bridge dropped a whole group."""

    ZERO_TRAINABLE = "zero_trainable"
    LOW_COMPLETE_FRACTION = "low_complete_fraction"
    LOGPROB_ERROR = "logprob_error"
    FAILED = "failed"
    STALE = "stale"


IDS = np.dtype(np.int32)
LOGPROBS = np.dtype(np.float32)
MASK = np.dtype(np.uint8)

VersionSpan = tuple[int, int, str]
"""[start, end) over response_ids, and the policy version (text, as the engine gave it) that sampled them."""


def _exactly(numbers: Any, kind: np.dtype[Any]) -> np.ndarray:
    """Raises ValueError where the kind does not hold them: another id is never put in place of one."""
    given = np.asarray(numbers)
    if given.dtype == kind:
        return given
    with np.errstate(invalid="ignore"):
        array = given.astype(kind)
    if not np.array_equal(array, given):
        raise ValueError(f"not whole numbers that fit {kind}")
    return array


class Trace(msgspec.Struct, kw_only=True):
    """One training sequence.

    prompt_ids [P], response_ids [R], loss_mask [R], response_logprobs [R] or None (0.0 where the mask is 0).
    None means that a sampled token has no usable logprob: the mask stands, the bridge refuses the group by name.
    """

    prompt_ids: np.ndarray
    response_ids: np.ndarray
    loss_mask: np.ndarray
    prompt_messages: list[dict[str, Any]] = []
    response_messages: list[dict[str, Any]] = []
    tools: list[dict[str, Any]] | None = None
    finish_reason: str | None = None
    response_logprobs: np.ndarray | None = None
    reward: float | None = None
    metadata: dict[str, Any] = {}
    weight_versions: list[VersionSpan] = []

    def __post_init__(self) -> None:
        self.prompt_ids = _exactly(self.prompt_ids, IDS)
        self.response_ids = _exactly(self.response_ids, IDS)
        self.loss_mask = _exactly(self.loss_mask, MASK)
        if self.response_logprobs is not None:
            self.response_logprobs = np.asarray(self.response_logprobs, LOGPROBS)

    @property
    def trainable(self) -> int:
        return int(self.loss_mask.sum())


class Trajectory(msgspec.Struct, kw_only=True):
    """All traces of a session. `metadata` has tokens, calls, evaluation (written by `public.py`)."""

    status: SessionStatus
    metadata: dict[str, Any] = {}
    traces: list[Trace] = []
    error: str | None = None


class TokenLedger(msgspec.Struct, kw_only=True, frozen=True):
    """sampled = trainable + Σ excluded.values(), always; `attempt_discarded` counts other attempts' tokens."""

    sampled: Whole = 0
    trainable: Whole = 0
    excluded: dict[str, Whole] = {}
    attempt_discarded: Whole = 0

    @property
    def balanced(self) -> bool:
        return self.sampled == self.trainable + sum(self.excluded.values())


class CallCounts(msgspec.Struct, kw_only=True, frozen=True):
    """How the session's completions came to their context."""

    completions: Whole = 0
    """model calls that the engine answered: it handed over tokens, or finished with neither abort nor error"""
    continued: Whole = 0
    """completions whose prompt was the ids of an earlier call and what followed (the proxy rendered only the new)"""
    rendered: Whole = 0
    """completions whose whole prompt the proxy rendered; the rest had theirs from the engine"""
    rendered_reasoning: Whole = 0
    """of these: continued an answer with thinking, which `reasoning` of the task says to render again"""
    rendered_no_bridge: Whole = 0
    """of these: continued an answer, and the chat template gave no exact way to go on from its ids"""
    forks: Whole = 0
    """completions whose messages continue a call of which their prompt does not keep every id; drift among them"""
    drift: Whole = 0
    """forks whose prompt the engine rendered"""
    joined: Whole = 0
    """retries that joined a call in flight or had its answer replayed, and so made no call"""
    refused: Whole = 0
    """requests that made no engine call"""
    prompt_tokens: Whole = 0
    """ids of all completions' prompts, however many of them the engine had in its cache"""
    prefilled_again: Whole = 0
    """of these: ids of forks that stand where the continued call had others, so that the engine computed the same text
    twice; at most, since the first of what is new may be among them"""
    missing_logprobs: Whole = 0
    """completions with a sampled token that has no usable logprob"""
    without_ids: Whole = 0
    """completions of which the engine gave no token ids: recorded, and nothing of them to train"""
    reported_prompt_tokens: Whole = 0
    """of these, as the engine counts"""
    reported_completion_tokens: Whole = 0
    """of these, as the engine counts"""


class BuildResult(msgspec.Struct, kw_only=True):
    """What a builder returns: traces in the order of their first completion, and the balanced ledger."""

    traces: list[Trace]
    tokens: TokenLedger
    calls: CallCounts


class EvaluationResult(msgspec.Struct, kw_only=True):
    """`outcome_reward` goes to every trace; `trace_rewards` has one a trace and wins. None is never 0."""

    outcome_reward: float | None = None
    trace_rewards: list[float] | None = None
    metadata: dict[str, Any] = {}


class SessionTiming(msgspec.Struct, kw_only=True):
    """Milliseconds. `postrun_ms` = build_ms + eval_ms + clean-up."""

    register_to_init_queue_ms: float | None = None
    init_ms: float | None = None
    ready_queue_ms: float | None = None
    run_ms: float | None = None
    postrun_ms: float | None = None
    build_ms: float | None = None
    eval_ms: float | None = None
    e2e_ms: float | None = None


class SessionResult(msgspec.Struct, kw_only=True):
    session_id: str
    task_id: str
    status: SessionStatus
    trajectory: Trajectory | None = None
    timing: SessionTiming = msgspec.field(default_factory=SessionTiming)
    node_id: str | None = None
    error: str | None = None
    metadata: dict[str, Any] = {}


class TaskResult(msgspec.Struct, kw_only=True):
    """The callback's payload."""

    task_id: str
    status: TaskState
    results: list[SessionResult] = []
    result_paths: list[str] = []


class TaskStatus(msgspec.Struct, kw_only=True):
    task_id: str
    status: TaskState
    total_sessions: int = 0
    completed_sessions: int = 0
    results: list[SessionResult] = []
    result_paths: list[str] = []
    waiting_for: str | None = None
    """what the task waits for when no gateway can take it, in words; None otherwise"""
    error: str | None = None


class TaskSummary(msgspec.Struct, kw_only=True):
    task_id: str
    status: TaskState
    harness: str
    model: str
    num_samples: int
    completed_sessions: int = 0
    errored_sessions: int = 0
    mean_reward: float | None = None
    mean_traces: float | None = None
    mean_completions: float | None = None
    created_at: float = 0.0
    updated_at: float = 0.0
    source: str | None = None


class SessionSummary(msgspec.Struct, kw_only=True):
    session_id: str
    task_id: str
    status: SessionStatus
    node_id: str | None = None
    reward: float | None = None
    timing: SessionTiming = msgspec.field(default_factory=SessionTiming)
    error: str | None = None


class GatewayMetrics(msgspec.Struct, kw_only=True):
    init_queue_depth: Whole = 0
    init_inflight: Whole = 0
    ready_depth: Whole = 0
    run_inflight: Whole = 0
    postrun_queue_depth: Whole = 0
    postrun_inflight: Whole = 0


class Resources(msgspec.Struct, kw_only=True, frozen=True):
    """For a node's sandboxes, together."""

    cpus: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    memory_mb: Whole = 0
    gpus: Whole = 0


class GatewayNodeInfo(msgspec.Struct, kw_only=True):
    node_id: str
    gateway_url: str
    max_init_workers: int
    max_run_workers: int
    max_postrun_workers: int
    heartbeat_interval_seconds: float = 5.0
    metrics: GatewayMetrics = msgspec.field(default_factory=GatewayMetrics)
    healthy: bool = True
    draining: bool = False
    last_heartbeat: float = 0.0
    engine: str | None = None
    """its kind"""
    problem: str | None = None
    """of the engine, in words"""
    labels: dict[str, str] = {}
    resources: Resources = Resources()
    reserved: Resources = Resources()
    """what the sessions that it has may use"""


class Storage(msgspec.Struct, kw_only=True):
    """The server's data folder; bytes. `full`: new tasks are refused."""

    used_bytes: int
    limit_bytes: int | None
    free_bytes: int
    full: bool
    tasks: int
    retired_tasks: int


class Event(msgspec.Struct, kw_only=True):
    type: str
    ts: float
    data: dict[str, Any] = {}
