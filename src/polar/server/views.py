"""What people and trainers are shown of tasks, sessions and nodes, without reading a result."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from polar.records import GatewayNodeInfo, SessionSummary, TaskStatus, TaskSummary
from polar.server.line import can_run
from polar.server.state import Node, Session, Task

SUMMARY_COLUMNS = TaskSummary.__struct_fields__


def task_status(task: Task, live: Sequence[Node], *, full: bool = False) -> TaskStatus:
    """Without results. `full`: the server's disk has no room for more sessions."""
    return TaskStatus(
        task_id=task.task_id,
        status=task.status,
        total_sessions=task.num_samples,
        completed_sessions=task.completed_sessions,
        waiting_for=waiting_for(task, live, full=full),
        error=task.error,
    )


def waiting_for(task: Task, live: Sequence[Node], *, full: bool) -> str | None:
    """What has to change before a gateway can take the task's waiting sessions; None where it is only their turn."""
    if task.status.terminal or not any(session.queued for session in task.sessions):
        return None
    if full:
        return "room on the rollout server's disk"
    if not live:
        return "a gateway: none is connected"
    able = [node for node in live if can_run(node, task)]
    if not able:
        return _missing(task, live)
    taking = [node for node in able if not node.draining]
    if not taking:
        return f"a gateway: {_names(able)} drained"
    if any(node.engine.healthy for node in taking):
        return None
    return "a healthy engine: " + "; ".join(f"{node.node_id}: {node.engine.problem or 'not ready'}" for node in taking)


def _missing(task: Task, live: Sequence[Node]) -> str:
    for kind, wanted, known in (
        ("harness", task.harness, {name for node in live for name in node.harnesses}),
        ("runtime", task.runtime, {name for node in live for name in node.runtimes}),
    ):
        if wanted is not None and ":" not in wanted and wanted not in known:
            return f"a gateway with the {kind} {wanted!r}: {_names(live)} has {', '.join(sorted(known)) or 'none'}"
    return f"a gateway with both the harness {task.harness!r} and the runtime {task.runtime!r}"


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.node_id for node in nodes)


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


def node_info(node: Node, live: Sequence[Node]) -> GatewayNodeInfo:
    return GatewayNodeInfo(
        node_id=node.node_id,
        gateway_url=node.gateway_url,
        max_init_workers=node.workers.init,
        max_run_workers=node.workers.run,
        max_postrun_workers=node.workers.postrun,
        heartbeat_interval_seconds=node.heartbeat_interval_seconds,
        metrics=node.metrics,
        healthy=node.engine.healthy and any(other is node for other in live),
        draining=node.draining,
        last_heartbeat=node.last_heartbeat,
    )


def summaries(rows: Sequence[Sequence[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(SUMMARY_COLUMNS, row, strict=True)) for row in rows]
