"""Clocks for a stage: a budget that ends it and stands still while the proxy is paused, a timing that notes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import structlog

from polar.errors import PolarError, ServerFault
from polar.records import SessionTiming

T = TypeVar("T")
Paused = Callable[[], float]
"""tells the seconds so far that count against nobody"""
log = structlog.get_logger("polar.gateway")
_OBEY_SECONDS = 10.0
GRAIN_SECONDS = 0.05
"""between two looks at the clock while a pause holds the end off"""


def never() -> float:
    """Of a pause that there is not."""
    return 0.0


class StageTimeout(PolarError):
    """A stage used its budget up; what that means is the stage's to say."""

    default_name = "budget"


async def within(seconds: float, stage: str, work: Coroutine[Any, Any, T], paused: Paused) -> T:
    """What `work` returns or raises. Raises StageTimeout when it has used `seconds` up. However this ends, `work` has
    been cancelled; should it not obey, it is named and left to whoever takes its sandbox away."""
    task = asyncio.create_task(work)
    loop = asyncio.get_running_loop()
    started, before = loop.time(), paused()
    try:
        while not task.done():
            left = seconds - (loop.time() - started) + (paused() - before)
            if left <= 0:
                raise StageTimeout(f"the budget of {stage}, {seconds:g} s, is spent")
            await asyncio.wait({task}, timeout=max(left, GRAIN_SECONDS))
        if task.cancelled():
            raise ServerFault(f"{stage} cancelled itself", name="bug")
        return task.result()
    finally:
        if not task.done():
            await _cancel(task, stage)


async def _cancel(task: asyncio.Task[Any], stage: str) -> None:
    """Waits for the end of what the work still has to put in order, also when whoever waits is cancelled once more."""
    task.cancel()
    loop = asyncio.get_running_loop()
    deadline, again = loop.time() + _OBEY_SECONDS, False
    while not task.done() and loop.time() < deadline:
        try:
            await asyncio.wait({task}, timeout=deadline - loop.time())
        except asyncio.CancelledError:
            again = True
    _tell(task, stage)
    if again:
        raise asyncio.CancelledError


def _tell(task: asyncio.Task[Any], stage: str) -> None:
    if not task.done():
        log.error("does not end when it is cancelled", stage=stage)
    elif not task.cancelled() and (late := task.exception()) is not None:
        log.warning("fault while being cancelled", stage=stage, why=str(late))


@contextmanager
def timed(timing: SessionTiming, field: str) -> Iterator[None]:
    """Notes the milliseconds of the block, also when it fails."""
    started = time.monotonic()
    try:
        yield
    finally:
        setattr(timing, field, milliseconds(time.monotonic() - started))


def milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
