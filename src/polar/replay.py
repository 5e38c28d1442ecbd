"""A stored session built or scored anew, without inference: pure functions that give what the gateway would have
reported. The same log, builder and evaluator give the same bytes."""

from __future__ import annotations

import msgspec
import numpy as np

from polar.endings import EVALUATION_REPLACES, TABLE
from polar.errors import EvaluationFault
from polar.nodeapi import NodeResult
from polar.public import node_result, session_result
from polar.records import BuildResult, EvaluationResult, SessionResult, SessionStatus, Termination, TokenLedger, Trace

ATTEMPT_DISCARDED = "attempt_discarded"
"""how a trajectory ends that was built of an attempt which is not the accepted one: nothing of it is to be trained"""


def spread(result: EvaluationResult, traces: list[Trace]) -> None:
    """The outcome's reward goes to every trace; where there is a reward a trace, that wins."""
    for index, trace in enumerate(traces):
        trace.reward = result.trace_rewards[index] if result.trace_rewards else result.outcome_reward


def run_termination(stored: SessionResult) -> Termination | None:
    """What RUN ended with, by which the session is built and graded; None for one that ended without a trajectory,
    and not for want of a builder that can."""
    ended = node_result(stored)
    builds = TABLE[ended.termination].builds or ended.termination is Termination.BUILD
    return ended.run_termination if builds else None


def rebuilt(stored: SessionResult, built: BuildResult, attempt: int) -> SessionResult:
    """`built` of the accepted `attempt`'s log in the place of the stored trajectory. Where the builder had failed, the
    session goes by what its run ended with. A stored evaluation goes on to hold, but for rewards a trace where the
    traces are now others."""
    before = node_result(stored)
    fresh = _handed_on(before, built)
    fresh.attempt = attempt
    if before.termination is not Termination.EVALUATION and before.run_termination is not None:
        fresh = _named(fresh, before.run_termination)
    if before.evaluation is not None and _holds(before.evaluation, before.traces or [], built.traces):
        spread(before.evaluation, built.traces)
        fresh.evaluation, fresh.evaluator = before.evaluation, before.evaluator
    return _public(fresh, stored)


def discarded(stored: SessionResult, built: BuildResult, attempt: int) -> SessionResult:
    """A trajectory of an attempt that is not the accepted one."""
    accepted = stored.metadata.get("attempt")
    result = NodeResult(
        session_id=stored.session_id,
        attempt=attempt,
        node_id="",
        epoch=0,
        status=SessionStatus.ERROR,
        termination=Termination.INFRASTRUCTURE,
        fault=ATTEMPT_DISCARDED,
        error=f"attempt {attempt}; " + (f"accepted was {accepted}" if accepted else "none was accepted"),
        traces=built.traces,
        tokens=built.tokens,
        calls=built.calls,
    )
    return _public(result, stored)


def rescored(stored: SessionResult, evaluator: str, outcome: EvaluationResult | EvaluationFault) -> SessionResult:
    """The stored trajectory with the rewards of `outcome`, or with none where it is a fault. Raises ValueError for a
    session that has nothing to score."""
    before = node_result(stored)
    if before.traces is None or before.run_termination is None:
        raise ValueError(f"session {stored.session_id} has no trajectory")
    fresh = _named(before, before.run_termination)
    fresh.traces = [msgspec.structs.replace(trace, reward=None) for trace in before.traces]
    fresh.evaluator, fresh.evaluation = evaluator, None
    if isinstance(outcome, EvaluationResult):
        fresh.evaluation = outcome
        spread(outcome, fresh.traces)
    elif before.run_termination in EVALUATION_REPLACES:
        fresh = _named(fresh, Termination.EVALUATION, outcome)
    return _public(fresh, stored)


def _handed_on(before: NodeResult, built: BuildResult) -> NodeResult:
    others = (before.tokens or TokenLedger()).attempt_discarded
    tokens = msgspec.structs.replace(built.tokens, attempt_discarded=others)
    return msgspec.structs.replace(before, traces=built.traces, tokens=tokens, calls=built.calls, evaluation=None)


def _named(result: NodeResult, termination: Termination, fault: EvaluationFault | None = None) -> NodeResult:
    return msgspec.structs.replace(
        result,
        termination=termination,
        status=TABLE[termination].status,
        fault=fault.name if fault else None,
        error=fault.message if fault else None,
    )


def _holds(evaluation: EvaluationResult, before: list[Trace], after: list[Trace]) -> bool:
    return not evaluation.trace_rewards or (len(before) == len(after) and all(map(_same_ids, before, after)))


def _same_ids(one: Trace, other: Trace) -> bool:
    return np.array_equal(one.prompt_ids, other.prompt_ids) and np.array_equal(one.response_ids, other.response_ids)


def _public(result: NodeResult, stored: SessionResult) -> SessionResult:
    known = stored.metadata
    return session_result(result, stored.task_id, known.get("session_index", 0), known.get("group_size"))
