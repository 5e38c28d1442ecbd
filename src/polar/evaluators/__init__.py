"""Evaluators by name: from a finished session to a finite reward, or an EvaluationFault; never a 0 for want of one."""

from __future__ import annotations

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
    name = None if ":" in spec.strategy else spec.strategy
    path = spec.strategy if name is None else None
    evaluator: Evaluator = load("evaluator", EVALUATORS, name, path)(spec)
    return evaluator
