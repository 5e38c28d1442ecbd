"""Plug-ins as a user might write them, and as they should not be."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec

from polar.harnesses.base import BaseHarness
from polar.protocols import ExecResult, Place
from polar.requests import ExecInput
from polar.runtimes.bubblewrap import Bubblewrap
from polar.trajectory.prefix_merging import PrefixMerging


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


class Unbalanced(PrefixMerging):
    """A builder that loses a token."""

    def build(self, log: Any, *, include_auxiliary: bool = False) -> Any:
        built = super().build(log, include_auxiliary=include_auxiliary)
        built.tokens = msgspec.structs.replace(built.tokens, sampled=built.tokens.sampled + 1)
        return built


class Oracle(BaseHarness):
    """It knows the answer, and asks no model."""

    makes_calls = False

    def run_steps(self, instruction: str) -> list[ExecInput]:
        return [ExecInput(command='touch "$ARTIFACTS_DIR/done"')]


class HangingStart(Bubblewrap):
    """A sandbox that never comes up."""

    async def start(self, place: Place) -> None:
        await asyncio.Event().wait()


class ColdStart(Bubblewrap):
    """Its first sandbox for grading does not come up."""

    async def start(self, place: Place) -> None:
        if place.session_id.endswith(".eval1"):
            raise KeyError("a bug of the runtime's")
        await super().start(place)


class SlowStop(Bubblewrap):
    """A sandbox that takes its time to go. While it goes there is a file beside its folder."""

    async def start(self, place: Place) -> None:
        self._sign = place.folder.with_name(place.folder.name + ".going")
        await super().start(place)

    async def stop(self) -> None:
        self._sign.touch()
        await asyncio.sleep(2)
        await super().stop()
        self._sign.unlink()


class BadStop(Bubblewrap):
    """A sandbox that goes, and then complains."""

    async def stop(self) -> None:
        await super().stop()
        raise KeyError("a bug of the runtime's")


class DroppedExec(Bubblewrap):
    """In its first attempt an agent loses its connection as soon as it has written $SESSION_DIR/begun."""

    async def start(self, place: Place) -> None:
        self._attempt = place.attempt
        await super().start(place)

    async def run(self, step: ExecInput, *, timeout: float, log: Path | None = None) -> ExecResult:
        running = asyncio.ensure_future(super().run(step, timeout=timeout, log=log))
        if self._attempt > 1:
            return await running
        while not await self._begun():
            await asyncio.sleep(0.02)
        running.add_done_callback(lambda ended: ended.exception())
        raise ConnectionResetError("the connection to the sandbox was reset")

    async def _begun(self) -> bool:
        try:
            return bool(await self.read(f"{self.session_dir}/begun"))
        except FileNotFoundError:
            return False
