"""One thread runs the model, and everything that changes what it runs happens between two of its steps.

Requests join and leave the running batch at any step. New weights take effect when no request runs, or at once while
the engine is paused: an answer crosses an update only where a caller asked for that (`in_place`, `retract`), and
never in abort mode. What was sampled is reported in the order of sampling, with the version of the weights that
sampled it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch

from polar.embedded.batch import Batch, Sequence
from polar.embedded.checkpoint import Checkpoint, PolicyModel

T = TypeVar("T")


@dataclass(frozen=True)
class Update:
    """`tokens` of the sequence are sampled now; the newest of them by the weights of this version."""

    tokens: int
    weight_version: str
    finish: dict[str, Any] | None


class Scheduler:
    """`submit` and `call` are for the event loop's thread; what `call` is given runs on the worker's."""

    def __init__(self, checkpoint: Checkpoint, *, weight_version: str, max_running: int, threads: int) -> None:
        self.weight_version, self.model_path = weight_version, checkpoint.path
        self.max_running, self.paused = max_running, False
        self.failed = asyncio.Event()
        self._batch, self._threads = Batch(checkpoint), threads
        self._waiting: deque[Sequence] = deque()
        self._swaps: deque[tuple[PolicyModel, str, str | None, Future[None]]] = deque()
        self._inbox: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._listeners: dict[str, asyncio.Queue[Update]] = {}
        self._loop = asyncio.get_running_loop()
        self._open = True
        self._thread = threading.Thread(target=self._run, name="model", daemon=True)
        self._thread.start()

    def submit(self, sequence: Sequence) -> asyncio.Queue[Update]:
        """Raises ValueError where a request of this rid is still running. Call `forget` in the end."""
        if sequence.rid in self._listeners:
            raise ValueError(f"rid: {sequence.rid!r} is already running")
        updates = self._listeners[sequence.rid] = asyncio.Queue()
        self._inbox.put(lambda: self._waiting.append(sequence))
        return updates

    def forget(self, rid: str) -> None:
        """Nobody waits for this request any more: it stops running, if it still does."""
        if self._listeners.pop(rid, None) is not None:
            self._inbox.put(lambda: self._abort(lambda sequence: sequence.rid == rid))

    async def call(self, change: Callable[[], T]) -> T:
        """Run something between two steps; nothing where the caller is gone by then."""
        future: Future[T] = Future()

        def order() -> None:
            if future.set_running_or_notify_cancel():
                future.set_result(change())

        self._inbox.put(order)
        return await asyncio.wrap_future(future)

    async def abort(self, rid: str | None) -> None:
        """End one request, or all of them for None, with what they have; unknown ones are ignored."""
        await self.call(lambda: self._abort(lambda sequence: rid in (None, sequence.rid)))

    async def pause(self, mode: str) -> None:
        await self.call(lambda: self._pause(mode))

    async def resume(self) -> None:
        await self.call(lambda: setattr(self, "paused", False))

    async def swap(self, policy: PolicyModel, path: str, weight_version: str | None) -> None:
        """Returns when the next step is one of the new weights."""
        done: Future[None] = Future()
        self._inbox.put(lambda: self._swaps.append((policy, path, weight_version, done)))
        await asyncio.wrap_future(done)

    def load(self) -> dict[str, int]:
        return {"num_running_reqs": len(self._batch.sequences), "num_waiting_reqs": len(self._waiting)}

    async def close(self) -> None:
        self._inbox.put(lambda: setattr(self, "_open", False))
        await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)
        try:
            while self._open:
                self._take_orders()
                if self._swaps and (self.paused or not self._batch.sequences):
                    self._swap()
                if not self.paused and self._open:
                    self._step()
        finally:  # an engine without its thread answers nobody: the process must end
            if self._open:
                self._loop.call_soon_threadsafe(self.failed.set)

    def _take_orders(self) -> None:
        idle = self.paused or not (self._batch.sequences or self._waiting)
        try:
            while True:
                self._inbox.get(block=idle)()
                idle = False
        except Empty:
            return

    def _step(self) -> None:
        room = 0 if self._swaps else self.max_running - len(self._batch.sequences)
        joining = [self._waiting.popleft() for _ in range(min(room, len(self._waiting)))]
        stepping = list(self._batch.sequences)
        if stepping:
            self._batch.step()
        if joining:
            self._batch.add(joining)
        self._report(stepping + joining)

    def _report(self, sequences: list[Sequence]) -> None:
        updates = [(s.rid, Update(len(s.output_ids), self.weight_version, s.finish)) for s in sequences]
        self._batch.drop({sequence for sequence in sequences if sequence.finish})
        if updates:
            self._loop.call_soon_threadsafe(self._deliver, updates)

    def _deliver(self, updates: list[tuple[str, Update]]) -> None:
        for rid, update in updates:
            if rid in self._listeners:
                self._listeners[rid].put_nowait(update)

    def _abort(self, chosen: Callable[[Sequence], bool]) -> None:
        aborted = [sequence for sequence in [*self._batch.sequences, *self._waiting] if chosen(sequence)]
        self._waiting = deque(sequence for sequence in self._waiting if not chosen(sequence))
        for sequence in aborted:
            sequence.finish = {"type": "abort", "message": "aborted"}
        self._report(aborted)

    def _pause(self, mode: str) -> None:
        self.paused = True
        if mode == "abort":
            self._abort(lambda sequence: True)
        elif mode == "retract":
            self._retract()

    def _retract(self) -> None:
        self._waiting.extendleft(reversed(self._batch.sequences))
        self._batch.drop(set(self._batch.sequences))

    def _swap(self) -> None:
        self._retract()  # what the old weights left in the cache is not what the new ones would
        while self._swaps:
            policy, path, weight_version, done = self._swaps.popleft()
            if not done.set_running_or_notify_cancel():
                continue
            self._batch.use(policy)
            self.model_path = path
            self.weight_version = self.weight_version if weight_version is None else weight_version
            done.set_result(None)
