"""The pause: while it is on, no new engine call starts; it drains the running ones or cuts them short. It ends by
itself, so that whoever paused and is gone holds nobody up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Literal, TypeVar

T = TypeVar("T")


class Gate:
    def __init__(self) -> None:
        self._open = asyncio.Event()
        self._open.set()
        self._idle = asyncio.Event()
        self._idle.set()
        self._running: set[asyncio.Task[Any]] = set()
        self._cut: set[asyncio.Task[Any]] = set()
        self._calls = 0
        self._paused_at: float | None = None
        self._paused_before = 0.0
        self._end: asyncio.TimerHandle | None = None

    @property
    def paused(self) -> bool:
        return self._paused_at is not None

    @property
    def running(self) -> int:
        return self._calls

    @property
    def paused_seconds(self) -> float:
        now = 0.0 if self._paused_at is None else time.monotonic() - self._paused_at
        return self._paused_before + now

    async def run(self, step: Coroutine[Any, Any, T], *, call: bool = True) -> T | None:
        """Waits while paused, then runs `step`; None when a pause cut it short. `call`: it counts in `running`."""
        try:
            await self._open.wait()
        except asyncio.CancelledError:
            step.close()
            raise
        task = asyncio.current_task()
        assert task is not None
        self._running.add(task)
        self._calls += call
        self._idle.clear()
        try:
            return await step
        except asyncio.CancelledError:
            if task in self._cut and not task.uncancel():
                return None
            raise
        finally:
            self._running.discard(task)
            self._calls -= call
            self._cut.discard(task)
            if not self._running:
                self._idle.set()

    async def pause(self, mode: Literal["drain", "abort"], timeout_seconds: float) -> bool:
        """True when nothing runs any more; False when the pause has ended before that. It ends after
        `timeout_seconds`, in place of an earlier one's time."""
        if self._paused_at is None:
            self._paused_at = time.monotonic()
            self._open.clear()
        if self._end is not None:
            self._end.cancel()
        self._end = asyncio.get_running_loop().call_later(timeout_seconds, self.resume)
        if mode == "abort":
            for task in self._running - self._cut:
                task.cancel()
            self._cut |= self._running
        ends = [asyncio.ensure_future(self._idle.wait()), asyncio.ensure_future(self._open.wait())]
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for end in ends:
                end.cancel()
        return self.paused and not self._running

    def resume(self) -> None:
        if self._paused_at is not None:
            self._paused_before += time.monotonic() - self._paused_at
            self._paused_at = None
            self._open.set()
        if self._end is not None:
            self._end.cancel()
            self._end = None
