"""Stage pools: how many sessions may be in a stage at once, and the counts that a poll reports."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress

from polar.gateway.budgets import GRAIN_SECONDS, StageTimeout
from polar.nodeapi import Workers
from polar.records import GatewayMetrics


class Stage:
    """One pool; `waiting` and `inside` count sessions."""

    def __init__(self, size: int, changed: asyncio.Event) -> None:
        self.size = size
        self.counts: Counter[str] = Counter()
        self._changed = changed
        self._slots = asyncio.Semaphore(size)

    @property
    def waiting(self) -> int:
        return self.counts["waiting"]

    @property
    def inside(self) -> int:
        return self.counts["inside"]

    @asynccontextmanager
    async def slot(self, patience: Callable[[], float] | None = None) -> AsyncIterator[None]:
        """`patience` tells how many seconds more may be waited. Raises StageTimeout when there are none left."""
        with self._counted("waiting"):
            await self._acquire(patience)
        try:
            with self._counted("inside"):
                yield
        finally:
            self._slots.release()

    async def _acquire(self, patience: Callable[[], float] | None) -> None:
        if patience is None:
            await self._slots.acquire()
            return
        while (left := patience()) > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(max(left, GRAIN_SECONDS)):
                    await self._slots.acquire()
                    return
        raise StageTimeout("no run slot came free within the queue budget", name="queue")

    @contextmanager
    def _counted(self, what: str) -> Iterator[None]:
        self.counts[what] += 1
        try:
            yield
        finally:
            self.counts[what] -= 1
            self._changed.set()


class Stages:
    """The three pools of a gateway. Sessions that are ready wait for a run slot with their sandbox up."""

    def __init__(self, workers: Workers) -> None:
        self.workers = workers
        self.changed = asyncio.Event()
        """set whenever a session has left a stage"""
        self.init, self.run, self.postrun = (
            Stage(size, self.changed) for size in (workers.init, workers.run, workers.postrun)
        )

    def room(self, held: int) -> Workers:
        """How many more sessions this gateway takes now, `held` being all that it has: never so many that a sandbox
        is brought up only to wait behind a full set of others."""
        in_init = self.init.waiting + self.init.inside
        before_end = in_init + self.run.waiting + self.run.inside
        total = self.workers.init + self.workers.run + self.workers.postrun
        free = min(self.workers.init + self.workers.run - before_end, total - held)
        return Workers(init=max(0, free), run=max(0, self.workers.run - self.run.inside), postrun=max(0, total - held))

    def metrics(self) -> GatewayMetrics:
        return GatewayMetrics(
            init_queue_depth=self.init.waiting,
            init_inflight=self.init.inside,
            ready_depth=self.run.waiting,
            run_inflight=self.run.inside,
            postrun_queue_depth=self.postrun.waiting,
            postrun_inflight=self.postrun.inside,
        )
