"""The one place that writes contract fields into the public `metadata` of results, and reads them back."""

from __future__ import annotations

from typing import Any

import msgspec

from polar.codec import to_builtins
from polar.endings import TABLE
from polar.nodeapi import NodeResult
from polar.records import CallCounts, EvaluationResult, SessionResult, Termination, TokenLedger, Trajectory


def session_result(
    result: NodeResult, task_id: str, session_index: int, group_size: int | None = None
) -> SessionResult:
    """metadata: session_index, group_size (sessions of the task), attempt, termination, and exit_code, fault,
    harness_log where there are some; run_termination where RUN ended with another name than the session."""
    metadata: dict[str, Any] = {
        "session_index": session_index,
        "attempt": result.attempt,
        "termination": _termination(result),
    }
    optional = {
        "group_size": group_size,
        "exit_code": result.exit_code,
        "fault": result.fault,
        "harness_log": result.harness_log or None,
        "run_termination": result.run_termination if result.run_termination is not result.termination else None,
    }
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
        metadata["evaluation"] = result.evaluation.metadata | {
            "strategy": result.evaluator,
            "outcome_reward": result.evaluation.outcome_reward,
            "trace_rewards": result.evaluation.trace_rewards,
        }
    status = TABLE[result.run_termination].status if result.run_termination else result.status
    return Trajectory(status=status, metadata=metadata, traces=result.traces, error=result.error)


def _termination(result: NodeResult) -> str:
    """An infrastructure fault goes by its own name."""
    if result.termination is Termination.INFRASTRUCTURE and result.fault:
        return result.fault
    return result.termination.value


def node_result(result: SessionResult) -> NodeResult:
    """What `session_result` made `result` of; what does not show in it has its default. Raises ValidationError for
    metadata that it would not have written."""
    facts = msgspec.convert(result.metadata, _SessionFacts)
    known = result.trajectory
    told = msgspec.convert(known.metadata, _TrajectoryFacts) if known is not None else _TrajectoryFacts()
    named = facts.termination in list(Termination)
    termination = Termination(facts.termination) if named else Termination.INFRASTRUCTURE
    from_run = TABLE[termination].builds and termination is not Termination.EVALUATION
    return NodeResult(
        session_id=result.session_id,
        attempt=facts.attempt,
        node_id=result.node_id or "",
        epoch=0,
        status=result.status,
        termination=termination,
        fault=facts.fault,
        error=result.error,
        exit_code=facts.exit_code,
        traces=known.traces if known is not None else None,
        run_termination=facts.run_termination or (termination if from_run else None),
        tokens=told.tokens,
        calls=told.calls,
        evaluation=_evaluation(told.evaluation),
        evaluator=told.evaluation.get("strategy"),
        timing=result.timing,
        harness_log=facts.harness_log,
    )


class _SessionFacts(msgspec.Struct):
    termination: str = ""
    attempt: int = 0
    exit_code: int | None = None
    fault: str | None = None
    harness_log: str = ""
    run_termination: Termination | None = None


class _TrajectoryFacts(msgspec.Struct):
    tokens: TokenLedger | None = None
    calls: CallCounts | None = None
    evaluation: dict[str, Any] = {}


def _evaluation(told: dict[str, Any]) -> EvaluationResult | None:
    if not told:
        return None
    given = {name: told[name] for name in ("outcome_reward", "trace_rewards") if name in told}
    rest = {name: value for name, value in told.items() if name not in given and name != "strategy"}
    return msgspec.convert(given | {"metadata": rest}, EvaluationResult)
