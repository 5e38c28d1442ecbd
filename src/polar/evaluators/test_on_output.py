"""Runs tests and compares the outcome of each with the expected one: 1.0 when all are equal and there are some."""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar

from pydantic import field_validator

from polar.evaluators.base import BaseEvaluator, Config
from polar.protocols import EvaluationContext
from polar.records import EvaluationResult

_OUTCOME_FIRST = re.compile(r"^(PASSED|FAILED|ERROR|SKIPPED)\s+(\S.*?)(?:\s+-\s.*)?$")
_OUTCOME_LAST = re.compile(r"^(\S.*?)\s+(PASSED|FAILED|ERROR|SKIPPED)(?:\s+\(.*\))?(?:\s+\[\s*\d+%\])?$")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_SHOWN_DIFFERENCES = 20


class TestConfig(Config):
    """`expected_output_json`: {test: outcome}, as an object or as its JSON text."""

    test_command: str
    expected_output_json: dict[str, str]
    cwd: str | None = None

    @field_validator("expected_output_json", mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except RecursionError as error:
            raise ValueError("nested too deeply") from error


class TestOnOutput(BaseEvaluator):
    Config: ClassVar[type[Config]] = TestConfig

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        result = await self.execute(context, self.config.test_command, self.config.cwd)
        found = parse_outcomes(result.output)
        expected = self.config.expected_output_json
        differing = sorted(name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name))
        metadata = {"tests": len(found), "exit_code": result.exit_code, "differing": differing[:_SHOWN_DIFFERENCES]}
        return EvaluationResult(outcome_reward=float(bool(found) and not differing), metadata=metadata)


def parse_outcomes(output: str) -> dict[str, str]:
    """{test: outcome} of lines like `PASSED a.py::b`, `a.py::b PASSED [ 5%]`; of a test named twice, the last."""
    outcomes = {}
    for line in _COLOUR.sub("", output).splitlines():
        if first := _OUTCOME_FIRST.match(line.strip()):
            outcomes[first[2]] = first[1]
        elif last := _OUTCOME_LAST.match(line.strip()):
            outcomes[last[1]] = last[2]
    return outcomes
