"""The events stream: what happens is told to every onlooker as it happens; one who does not keep up is let go."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from polar.codec import to_json
from polar.records import Event

PING_SECONDS = 15.0
_BACKLOG = 1000


class Onlookers:
    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[bytes | None]] = set()

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        if not self._queues:
            return
        line = _line(kind, data)
        for queue in list(self._queues):
            if queue.qsize() < _BACKLOG:
                queue.put_nowait(line)
            else:
                self._let_go(queue)

    def close(self) -> None:
        for queue in list(self._queues):
            self._let_go(queue)

    async def watch(self) -> AsyncIterator[bytes]:
        queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._queues.add(queue)
        try:
            line: bytes | None = _line("hello", {})
            while line is not None:
                yield line
                try:
                    async with asyncio.timeout(PING_SECONDS):
                        line = await queue.get()
                except TimeoutError:
                    line = _line("ping", {})
        finally:
            self._queues.discard(queue)

    def _let_go(self, queue: asyncio.Queue[bytes | None]) -> None:
        self._queues.discard(queue)
        queue.put_nowait(None)


def _line(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json(Event(type=kind, ts=time.time(), data=data)))
