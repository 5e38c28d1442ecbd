"""Pausing inference at every gateway: an order that each acknowledges, and that ends by itself."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Any, Literal

from polar.nodeapi import Order

if TYPE_CHECKING:
    from polar.server.core import Core

_LOOK_SECONDS = 0.05


class Pauses:
    def __init__(self) -> None:
        self._order: Order | None = None
        self._until = 0.0

    async def pause(self, core: Core, mode: Literal["drain", "abort"], seconds: float) -> bool:
        """True when every connected gateway has paused; False when one did not in time, and all go on again."""
        order = Order(id=secrets.token_hex(8), kind="pause", mode=mode, timeout_seconds=seconds)
        self._order, self._until = order, core.now() + seconds
        core.machine.order(order, core.now())
        await core.settle()
        while self._order is order and core.now() < self._until:
            if not self._waiting(core):
                return True
            await asyncio.sleep(_LOOK_SECONDS)
        if self._order is order:
            await self.resume(core)
        return False

    async def resume(self, core: Core) -> None:
        self._order = None
        core.machine.order(Order(id=secrets.token_hex(8), kind="resume"), core.now())
        await core.settle()

    def status(self, core: Core) -> dict[str, Any]:
        paused = self._order is not None and core.now() < self._until
        waiting = self._waiting(core) if paused else []
        return {
            "paused": paused and not waiting,
            "mode": self._order.mode if paused and self._order is not None else None,
            "seconds_left": max(0.0, self._until - core.now()) if paused else 0.0,
            "waiting_for": waiting,
        }

    def _waiting(self, core: Core) -> list[str]:
        return [node.node_id for node in core.live_nodes() if self._order in node.orders]
