"""Finds an engine that hangs: it is asked whether it is alive while answers are silent for long, once for all of them.

A busy engine may be silent to a call for as long as it likes, so that no call has a time-out of its own. One that
answers and for `patience_seconds` hands nothing to anybody, the gateway's probe included, hangs as well.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

SILENCE_SECONDS = 15.0
PATIENCE_SECONDS = 300.0
_LOOKS = 3
"""in that time"""


class _Wait(msgspec.Struct):
    limit: asyncio.Timeout
    heard: float


class Watch:
    def __init__(self, alive: Callable[[], Awaitable[bool]], patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.found = ""
        """why the last limit expired"""
        self._alive = alive
        self._patience = patience_seconds
        self._silence = min(SILENCE_SECONDS, patience_seconds)
        self._heard = 0.0
        self._waits: dict[asyncio.Task[Any], _Wait] = {}
        self._looks: asyncio.Task[None] | None = None

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[asyncio.Timeout]:
        """While this task waits for an answer. The limit expires, as a TimeoutError, when the engine is found dead."""
        task = asyncio.current_task()
        assert task is not None
        async with asyncio.timeout(None) as limit:
            self._waits[task] = _Wait(limit, time.monotonic())
            if self._looks is None or self._looks.done():
                self._looks = asyncio.create_task(self._look())
            try:
                yield limit
            finally:
                del self._waits[task]

    def heard(self) -> None:
        """Something came for this task, which is waiting."""
        task = asyncio.current_task()
        assert task is not None
        self._waits[task].heard = self._heard = time.monotonic()

    async def close(self) -> None:
        if self._looks is not None:
            self._looks.cancel()
            await asyncio.wait({self._looks})

    async def _look(self) -> None:
        """Ends when nobody waits any more."""
        while self._waits:
            await asyncio.sleep(self._silence / _LOOKS)
            since = time.monotonic() - self._silence
            if any(wait.heard < since for wait in self._waits.values()) and not await self._alive():
                self._expire(since, "not even /health answers")
            elif self._heard < (since := time.monotonic() - self._patience):
                self._expire(since, f"it answers /health, and has handed nothing to anybody for {self._patience:g} s")

    def _expire(self, since: float, found: str) -> None:
        """Ends the waits that were silent since then."""
        self.found = found
        for wait in self._waits.values():
            if wait.heard < since:
                wait.limit.reschedule(asyncio.get_running_loop().time())
