"""What people and trainers are shown of tasks, sessions and nodes, without reading a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.records import GatewayNodeInfo, SessionSummary, TaskStatus, TaskSummary
from polar.server.needs import resources_of
from polar.server.placement import waiting_for
from polar.server.state import Node, Session, Task

SUMMARY_COLUMNS = TaskSummary.__struct_fields__


_PAUSE = "the end of the pause of inference (POST /rollout/inference/resume ends it)"


def task_status(task: Task, live: Sequence[Node], *, full: bool = False, paused: bool = False) -> TaskStatus:
    """Without results. `full`: the server's disk has no room for more sessions."""
    waits = waiting_for(task, live, full=full)
    return TaskStatus(
        task_id=task.task_id,
        status=task.status,
        total_sessions=task.num_samples,
        completed_sessions=task.completed_sessions,
        waiting_for=waits or (_PAUSE if paused and not task.status.terminal else None),
        error=task.error,
    )


def session_summary(session: Session) -> SessionSummary:
    return SessionSummary(
        session_id=session.session_id,
        task_id=session.task_id,
        status=session.status,
        node_id=session.node_id,
        reward=session.reward,
        timing=session.timing,
        error=session.error,
    )


_SILENT = "not heard of since last_heartbeat: the gateway, its machine or the way to it is down"


def node_info(node: Node, live: Sequence[Node]) -> GatewayNodeInfo:
    heard = any(other is node for other in live)
    return GatewayNodeInfo(
        node_id=node.node_id,
        gateway_url=node.gateway_url,
        max_init_workers=node.workers.init,
        max_run_workers=node.workers.run,
        max_postrun_workers=node.workers.postrun,
        heartbeat_interval_seconds=node.heartbeat_interval_seconds,
        metrics=node.metrics,
        healthy=node.engine.healthy and heard,
        draining=node.draining,
        last_heartbeat=node.last_heartbeat,
        engine=node.engine.kind,
        problem=node.engine.problem if heard else _SILENT,
        labels=node.labels,
        resources=resources_of(node.total),
        reserved=resources_of(node.reserved),
    )


def summaries(rows: Sequence[Sequence[Any]]) -> list[TaskSummary]:
    return [TaskSummary(**dict(zip(SUMMARY_COLUMNS, row, strict=True))) for row in rows]
