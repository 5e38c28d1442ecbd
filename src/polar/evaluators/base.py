"""What evaluators share: a config refused by name when wrong, and a command in the sandbox that ends in time."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from polar.config import wrong_fields
from polar.errors import EvaluationFault
from polar.protocols import EvaluationContext, ExecResult
from polar.requests import EvaluatorSpec, ExecInput

SHOWN = 2000
"""characters of a command's output in a message"""
_NOT_RUN = (126, 127)
"""what a shell says of a program that it cannot start or find"""


class Config(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class BaseEvaluator:
    """`evaluator.config` is checked against `Config` of the class when it is made. Raises WrongFields."""

    needs_runtime: ClassVar[bool] = True
    Config: ClassVar[type[Config]] = Config

    def __init__(self, spec: EvaluatorSpec) -> None:
        self.spec = spec
        try:
            self.config: Any = self.Config.model_validate(spec.config)
        except ValidationError as error:
            raise wrong_fields(error, "evaluator", "config") from error

    async def execute(self, context: EvaluationContext, command: str, cwd: str | None = None) -> ExecResult:
        """Runs `command` with the evaluator's environment. Raises EvaluationFault when it is not there to be run
        (exit code 126 or 127), or does not end in time."""
        if context.runtime is None:
            raise EvaluationFault(f"{self.spec.strategy} needs a sandbox, and the session has none left")
        step = ExecInput(command=command, cwd=cwd, env=self.spec.env)
        result = await context.runtime.run(step, timeout=context.timeout)
        if result.timed_out:
            raise EvaluationFault(f"the scoring command did not end within {context.timeout:g} s: {shown(result)}")
        if result.exit_code in _NOT_RUN:
            raise EvaluationFault(f"the scoring command cannot be run: {shown(result)}")
        return result


def shown(result: ExecResult) -> str:
    return (result.errors or result.output)[-SHOWN:].strip() or "it printed nothing"
