"""Clocks for a stage: a budget that ends it, a timing that notes it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

from polar.errors import PolarError
from polar.records import SessionTiming


class StageTimeout(PolarError):
    """A stage used its budget up; what that means is the stage's to say."""

    default_name = "budget"


@asynccontextmanager
async def budget(seconds: float, stage: str) -> AsyncIterator[None]:
    """Raises StageTimeout when the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError as late:
        if clock.expired():
            raise StageTimeout(f"the budget of {stage}, {seconds:g} s, is spent") from late
        raise


async def finished_within(work: Coroutine[Any, Any, None], seconds: float, paused: Callable[[], float]) -> bool:
    """Runs `work`; False when it was cancelled because it had used `seconds` up. `paused` tells the seconds so far
    that count for nobody. What `work` raises is raised."""
    started, paused_before = time.monotonic(), paused()
    task = asyncio.create_task(work)
    try:
        while not task.done():
            left = seconds - (time.monotonic() - started) + (paused() - paused_before)
            if left <= 0:
                return False
            await asyncio.wait({task}, timeout=left)
        await task
        return True
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})


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
