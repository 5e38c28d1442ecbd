"""Every sandbox that one attempt starts: the agent's, and the fresh ones that it is graded in. `close` leaves none."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from polar.errors import SandboxFault
from polar.plugins import blamed_on
from polar.protocols import Place, Runtime
from polar.requests import RuntimeSpec
from polar.runtimes import Launcher, load_runtime, prepare

log = structlog.get_logger("polar.gateway")
UNBOUNDED = 1e8
"""seconds; where the stage's own clock is what ends a command"""


class Sandboxes:
    """`root`: the folder that holds a folder of each sandbox while it lives."""

    def __init__(
        self, session_id: str, attempt: int, spec: RuntimeSpec, *, root: Path, default: str | None, launcher: Launcher
    ) -> None:
        self._session_id, self._attempt = session_id, attempt
        self._spec, self._root, self._default, self._launcher = spec, root, default, launcher
        self._made: list[Runtime] = []
        self._warm: asyncio.Task[Runtime] | None = None

    async def start(self) -> Runtime:
        """The agent's. Raises SandboxFault `sandbox_start`, or TaskFault for a runtime that there is not."""
        return await self._start(self._session_id)

    def warm(self) -> None:
        """Begins to bring a sandbox for grading up; `fresh` waits for it."""
        self._warm = asyncio.create_task(self._prepared())

    async def fresh(self) -> Runtime:
        """One that no agent has seen, with the actions of eval_prepare done. Raises SandboxFault, TaskFault."""
        warm, self._warm = self._warm, None
        return await (warm if warm is not None else self._prepared())

    async def close(self) -> None:
        """Raises SandboxFault or OSError when one could not be cleared away; the others are."""
        if self._warm is not None:
            self._warm.cancel()
            await asyncio.gather(self._warm, return_exceptions=True)
        faults = await asyncio.gather(*(_stop(runtime) for runtime in self._made), return_exceptions=True)
        for fault in faults:
            if fault is not None:
                raise fault

    async def _prepared(self) -> Runtime:
        runtime = await self._start(f"{self._session_id}.eval{len(self._made)}")
        actions = self._spec.prepare if self._spec.eval_prepare is None else self._spec.eval_prepare
        await prepare(runtime, actions, UNBOUNDED)
        return runtime

    async def _start(self, label: str) -> Runtime:
        runtime: Runtime = load_runtime(self._spec, self._default, self._launcher)
        self._made.append(runtime)
        folder = self._root / f"{label}.{self._attempt}"
        with blamed_on(SandboxFault, "the runtime's start"):
            await runtime.start(Place(session_id=label, attempt=self._attempt, folder=folder))
        return runtime


async def _stop(runtime: Runtime) -> None:
    with blamed_on(SandboxFault, "the runtime's stop"):
        await runtime.stop()
