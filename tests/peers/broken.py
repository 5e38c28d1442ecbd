"""Plug-ins as a user might write them, and as they should not be."""

from __future__ import annotations

from typing import Any


class Broken:
    """A builder, evaluator and harness in one: whatever it is asked, it raises."""

    makes_calls = True
    needs_runtime = False

    def __init__(self, spec: Any) -> None:
        self.spec = spec

    def build(self, log: Any, *, include_auxiliary: bool = False) -> Any:
        raise KeyError("a bug of the builder's")

    async def evaluate(self, context: Any) -> Any:
        raise KeyError("a bug of the evaluator's")

    async def setup(self, runtime: Any) -> None:
        raise KeyError("a bug of the harness's")
