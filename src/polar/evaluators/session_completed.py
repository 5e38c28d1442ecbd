"""1.0 when the harness ended by itself with exit code 0, else 0.0."""

from __future__ import annotations

from typing import ClassVar

from polar.evaluators.base import BaseEvaluator
from polar.protocols import EvaluationContext
from polar.records import EvaluationResult, Termination


class SessionCompleted(BaseEvaluator):
    needs_runtime: ClassVar[bool] = False

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        return EvaluationResult(outcome_reward=1.0 if context.termination is Termination.DONE else 0.0)
