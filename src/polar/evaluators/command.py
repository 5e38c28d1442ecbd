"""Runs a command of the task's own; the reward is what it writes to `reward_file`, else 1.0 for exit code 0."""

from __future__ import annotations

import json
import math
import os
from typing import Any, ClassVar

from polar.errors import EvaluationFault
from polar.evaluators.base import SHOWN, BaseEvaluator, Config, shown
from polar.protocols import EvaluationContext, ExecResult, Runtime
from polar.records import EvaluationResult


class CommandConfig(Config):
    """`reward_file`: a path in the sandbox, relative to where the command runs, that holds a number, or a JSON map
    with `reward`, or one of numbers (their mean). It is emptied before the command runs, so that only the command can
    have written it."""

    command: str
    cwd: str | None = None
    reward_file: str | None = None


class Command(BaseEvaluator):
    Config: ClassVar[type[Config]] = CommandConfig

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        path = self._reward_file()
        if path is not None and context.runtime is not None:
            await _empty(context.runtime, path)
        result = await self.execute(context, self.config.command, self.config.cwd)
        reward = float(result.exit_code == 0) if path is None else await self._reward(context, path, result)
        return EvaluationResult(outcome_reward=reward, metadata={"exit_code": result.exit_code})

    def _reward_file(self) -> str | None:
        path: str | None = self.config.reward_file
        return None if path is None else os.path.join(self.config.cwd or "", path)

    async def _reward(self, context: EvaluationContext, path: str, result: ExecResult) -> float:
        assert context.runtime is not None, "the command has run in it"
        try:
            text = (await context.runtime.read(path)).decode()
        except (OSError, UnicodeDecodeError) as error:
            raise EvaluationFault(f"reward_file {path} cannot be read: {error}; {_ended(result)}") from error
        if not text.strip():
            raise EvaluationFault(f"the command wrote nothing to reward_file {path}; {_ended(result)}")
        try:
            return parse_reward(text)
        except ValueError as error:
            held = text.strip()[:SHOWN]
            raise EvaluationFault(f"reward_file {path} holds {held}: {error}; {_ended(result)}") from error


async def _empty(runtime: Runtime, path: str) -> None:
    try:
        await runtime.write(path, b"")
    except OSError as error:
        raise EvaluationFault(f"reward_file {path} cannot be emptied: {error}") from error


def _ended(result: ExecResult) -> str:
    return f"the command ended with exit code {result.exit_code}: {shown(result)}"


def parse_reward(text: str) -> float:
    """Raises ValueError for anything but a finite number."""
    try:
        document: Any = json.loads(text.strip())
    except (ValueError, RecursionError) as error:
        raise ValueError("it is neither a number nor a JSON map") from error
    if isinstance(document, dict):
        document = document["reward"] if "reward" in document else _mean(list(document.values()))
    return _finite(document)


def _mean(values: list[Any]) -> float:
    if not values:
        raise ValueError("the map is empty")
    return math.fsum(_finite(value) for value in values) / len(values)


def _finite(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)
