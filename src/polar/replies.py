"""What the rollout server's routes answer around the records themselves. Field names are the public API's names."""

from __future__ import annotations

import msgspec

from polar.records import GatewayNodeInfo, SessionSummary, Storage, TaskState, TaskSummary


class Accepted(msgspec.Struct, kw_only=True):
    task_id: str
    status: TaskState


class Health(msgspec.Struct, kw_only=True):
    status: str
    nodes: int


class Tasks(msgspec.Struct, kw_only=True):
    tasks: list[TaskSummary]


class Sessions(msgspec.Struct, kw_only=True):
    task_id: str
    sessions: list[SessionSummary]


class Nodes(msgspec.Struct, kw_only=True):
    nodes: list[GatewayNodeInfo]


class Pipeline(msgspec.Struct, kw_only=True):
    pending_sessions: int


class RolloutStatus(msgspec.Struct, kw_only=True):
    """`tasks`: the status of each by its id."""

    tasks: dict[str, TaskState]
    pipeline: Pipeline
    nodes: Nodes
    storage: Storage | None = None
    """None: another implementation of the API"""


class InferenceStatus(msgspec.Struct, kw_only=True):
    """`paused` once every gateway has said so; `waiting_for` names those that have not yet."""

    paused: bool
    mode: str | None = None
    seconds_left: float = 0.0
    waiting_for: list[str] = []


class Mistake(msgspec.Struct, kw_only=True):
    """One thing that is wrong with a request: where (`loc`: body, query or path, then the field's path) and what."""

    loc: list[str | int]
    msg: str
    type: str


class Problem(msgspec.Struct, kw_only=True):
    """Every answer of 400 and above."""

    detail: str | list[Mistake]
