"""The one place that writes contract fields into the public `metadata` of results."""

from __future__ import annotations

from typing import Any

from polar.codec import to_builtins
from polar.nodeapi import NodeResult
from polar.records import SessionResult, Termination, Trajectory


def session_result(result: NodeResult, task_id: str, session_index: int) -> SessionResult:
    """metadata: session_index, attempt, termination, and exit_code, fault, harness_log where there are some."""
    metadata: dict[str, Any] = {
        "session_index": session_index,
        "attempt": result.attempt,
        "termination": _termination(result),
    }
    optional = {"exit_code": result.exit_code, "fault": result.fault, "harness_log": result.harness_log or None}
    metadata |= {key: value for key, value in optional.items() if value is not None}
    return SessionResult(
        session_id=result.session_id,
        task_id=task_id,
        status=result.status,
        trajectory=_trajectory(result),
        timing=result.timing,
        node_id=result.node_id,
        error=result.error,
        metadata=metadata,
    )


def _trajectory(result: NodeResult) -> Trajectory | None:
    """metadata: termination, tokens (the ledger), calls, evaluation."""
    if result.traces is None:
        return None
    metadata: dict[str, Any] = {"termination": _termination(result)}
    if result.tokens is not None:
        metadata["tokens"] = to_builtins(result.tokens)
    if result.calls is not None:
        metadata["calls"] = to_builtins(result.calls)
    if result.evaluation is not None:
        metadata["evaluation"] = {
            "strategy": result.evaluator,
            "outcome_reward": result.evaluation.outcome_reward,
            "trace_rewards": result.evaluation.trace_rewards,
        } | result.evaluation.metadata
    status = result.run_status or result.status
    return Trajectory(status=status, metadata=metadata, traces=result.traces, error=result.error)


def _termination(result: NodeResult) -> str:
    """An infrastructure fault goes by its own name."""
    if result.termination is Termination.INFRASTRUCTURE and result.fault:
        return result.fault
    return result.termination.value
