"""Evaluators as a user might write them: they look at the trajectory alone."""

from __future__ import annotations

from polar.codec import to_builtins
from polar.evaluators.base import BaseEvaluator, Config
from polar.protocols import EvaluationContext
from polar.records import EvaluationResult


class PerTokenConfig(Config):
    each: float = 1.0


class PerToken(BaseEvaluator):
    """Every trace gets `each` for every trainable token of its own."""

    needs_runtime = False
    Config = PerTokenConfig

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        rewards = [self.config.each * trace.trainable for trace in context.trajectory.traces]
        said = {"asked": context.task.instruction, "ended": context.termination}
        return EvaluationResult(trace_rewards=rewards, metadata=said)


class Choosy(BaseEvaluator):
    """Has a bug that only shows on a session that is the second or later of its group."""

    needs_runtime = False

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        part = "-s0-" if "-s0-" in context.session_id else "-s1-"
        reward = {"-s0-": 0.25}[part]
        return EvaluationResult(outcome_reward=reward)


class Witness(BaseEvaluator):
    """Says what it was shown."""

    needs_runtime = False

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        asked = {"instruction": context.task.instruction, "metadata": context.task.metadata}
        traces = [to_builtins(trace) | {"reward": None} for trace in context.trajectory.traces]
        ended = {"status": context.status.value, "termination": context.termination.value}
        return EvaluationResult(outcome_reward=0.75, metadata={"saw": {"task": asked, "traces": traces, **ended}})
