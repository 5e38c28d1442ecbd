"""The events stream: what happens is told to every onlooker as it happens; one who does not keep up is let go."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator
from typing import Any

from polar.codec import to_json
from polar.records import Event

PING_SECONDS = 15.0
BACKLOG = 50_000
"""events that an onlooker may be behind: above what the end of one large task tells at once"""


class Onlooker:
    def __init__(self) -> None:
        self.lines: deque[bytes] = deque()
        self.news = asyncio.Event()
        self.gone = False

    async def next(self) -> bytes:
        """Everything there is to tell; nothing means the end."""
        try:
            async with asyncio.timeout(PING_SECONDS):
                await self.news.wait()
        except TimeoutError:
            return _line("ping", {})
        told = b"".join(self.lines)
        self.lines.clear()
        if not self.gone:
            self.news.clear()
        return told


class Onlookers:
    def __init__(self) -> None:
        self._all: set[Onlooker] = set()

    def tell(self, kind: str, data: dict[str, Any]) -> None:
        if not self._all:
            return
        line = _line(kind, data)
        for onlooker in list(self._all):
            onlooker.lines.append(line)
            onlooker.news.set()
            if len(onlooker.lines) > BACKLOG:
                onlooker.lines.clear()
                self._let_go(onlooker)

    def close(self) -> None:
        for onlooker in list(self._all):
            self._let_go(onlooker)

    async def watch(self) -> AsyncIterator[bytes]:
        onlooker = Onlooker()
        self._all.add(onlooker)
        try:
            told = _line("hello", {})
            while told:
                yield told
                told = await onlooker.next()
        finally:
            self._all.discard(onlooker)

    def _let_go(self, onlooker: Onlooker) -> None:
        """What it has not been told it is told yet, then its stream ends."""
        self._all.discard(onlooker)
        onlooker.gone = True
        onlooker.news.set()


def _line(kind: str, data: dict[str, Any]) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), to_json(Event(type=kind, ts=time.time(), data=data)))
