"""EVAL: an evaluator gives finite rewards or the session has none; what fails is tried once more, and is never a 0."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable

import structlog

from polar.errors import EvaluationFault, SandboxFault, TaskFault
from polar.gateway.budgets import Paused, StageTimeout, never, within
from polar.plugins import blamed_on
from polar.protocols import EvaluationContext, Evaluator
from polar.records import EvaluationResult

log = structlog.get_logger("polar.gateway")
MakeContext = Callable[[], Awaitable[EvaluationContext]]
"""Makes the context of one try: with the agent's own sandbox, all processes dead, or a fresh one."""


async def grade(evaluator: Evaluator, seconds: float, context: MakeContext, paused: Paused = never) -> EvaluationResult:
    """Each try has `seconds`. Raises EvaluationFault after the second failure."""
    try:
        return await _grade_once(evaluator, seconds, context, paused)
    except EvaluationFault as first:
        log.warning("evaluation failed, once more", why=first.message)
        return await _grade_once(evaluator, seconds, context, paused)


async def _grade_once(evaluator: Evaluator, seconds: float, context: MakeContext, paused: Paused) -> EvaluationResult:
    try:
        return await within(seconds, "evaluate", _evaluate(evaluator, context), paused)
    except (StageTimeout, SandboxFault, TaskFault) as fault:
        raise EvaluationFault(fault.message) from fault


async def _evaluate(evaluator: Evaluator, make_context: MakeContext) -> EvaluationResult:
    context = await make_context()
    with blamed_on(EvaluationFault, "the evaluator"):
        result = await evaluator.evaluate(context)
    _check(result, len(context.trajectory.traces))
    return result


def _check(result: EvaluationResult, traces: int) -> None:
    if result.trace_rewards is not None and len(result.trace_rewards) != traces:
        raise EvaluationFault(f"the evaluator gave {len(result.trace_rewards)} trace_rewards for {traces} traces")
    rewards: list[float | None] = [result.outcome_reward, *(result.trace_rewards or [])]
    given = [reward for reward in rewards if reward is not None]
    if not given or not all(math.isfinite(reward) for reward in given):
        raise EvaluationFault(f"the evaluator gave no finite reward: {rewards}")
