"""Evaluators by name: from a finished session to a finite reward, or an EvaluationFault; never a 0 for want of one."""

from __future__ import annotations

from typing import Any

from polar.plugins import load
from polar.protocols import Evaluator
from polar.requests import EvaluatorSpec

EVALUATORS = {
    "command": "polar.evaluators.command:Command",
    "session_completed": "polar.evaluators.session_completed:SessionCompleted",
    "test_on_output": "polar.evaluators.test_on_output:TestOnOutput",
}


def load_evaluator(spec: EvaluatorSpec) -> Evaluator:
    """Raises TaskFault: unknown name, wrong config."""
    evaluator: Evaluator = evaluator_class(spec.strategy)(spec)
    return evaluator


def evaluator_class(strategy: str) -> Any:
    """The class that makes it. Raises TaskFault for an unknown name."""
    return load("evaluator", EVALUATORS, strategy, strategy if ":" in strategy else None)
