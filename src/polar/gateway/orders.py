"""What the server tells the whole gateway: pause, resume, drain. Each order is obeyed once, the newest pause or resume
wins, and each is acknowledged until the server has heard it."""

from __future__ import annotations

import asyncio
import time

from polar.gateway.engine_watch import EngineWatch
from polar.nodeapi import Order


class Orders:
    def __init__(self, news: asyncio.Event) -> None:
        """`news` is set whenever there is something to acknowledge."""
        self.draining = False
        self.acknowledged: list[str] = []
        self._news = news
        self._begun: set[str] = set()
        self._done: set[str] = set()
        self._pausing: asyncio.Task[None] | None = None

    def obey(self, order: Order, watch: EngineWatch, tasks: asyncio.TaskGroup) -> None:
        """May be told of the same order again and again, and late of one that a newer has overtaken."""
        if order.id in self._begun:
            if order.id in self._done and order.id not in self.acknowledged:
                self._acknowledge(order)
            return
        self._begun.add(order.id)
        if order.kind == "drain":
            self.draining = True
            self._acknowledge(order)
            return
        if self._pausing is not None:
            self._pausing.cancel()
        if order.kind == "pause":
            self._pausing = tasks.create_task(self._pause(order, watch))
            return
        if watch.proxy is not None:
            watch.proxy.resume()
        self._acknowledge(order)

    def heard(self, ids: list[str]) -> None:
        """The server has these acknowledgements."""
        self.acknowledged = [order for order in self.acknowledged if order not in ids]

    async def _pause(self, order: Order, watch: EngineWatch) -> None:
        """Before there is a proxy nothing runs that would have to pause: it will begin with what is left of it."""
        until = time.monotonic() + order.timeout_seconds
        if watch.proxy is None:
            self._acknowledge(order)
            await watch.ready.wait()
        left = until - time.monotonic()
        assert watch.proxy is not None
        if left > 0 and await watch.proxy.pause(order.mode, left):
            self._acknowledge(order)

    def _acknowledge(self, order: Order) -> None:
        self._done.add(order.id)
        if order.id not in self.acknowledged:
            self.acknowledged.append(order.id)
            self._news.set()
