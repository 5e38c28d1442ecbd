"""Pausing inference at every gateway: an order that each acknowledges, and that ends by itself."""

from __future__ import annotations

import asyncio
import secrets
from typing import TYPE_CHECKING, Literal

from polar.nodeapi import Order
from polar.replies import InferenceStatus

if TYPE_CHECKING:
    from polar.server.core import Core

_LOOK_SECONDS = 0.05


async def pause(core: Core, mode: Literal["drain", "abort"], seconds: float) -> bool:
    """True when every connected gateway has paused; False when one did not in time, and all go on again, or when
    another order came between."""
    order = Order(id=secrets.token_hex(8), kind="pause", mode=mode, timeout_seconds=seconds)
    pause = core.machine.fleet.pause
    core.machine.fleet.order(order, core.now())
    until = pause.until
    await core.settle()
    while pause.order_id == order.id:
        if not _waiting(core):
            return True
        if core.now() >= until:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    if pause.order_id in (order.id, None) and core.now() >= until:
        await resume(core)
    return False


async def resume(core: Core) -> None:
    core.machine.fleet.order(Order(id=secrets.token_hex(8), kind="resume"), core.now())
    await core.settle()


def status(core: Core) -> InferenceStatus:
    pause, now = core.machine.fleet.pause, core.now()
    paused = core.machine.fleet.paused(now)
    waiting = _waiting(core) if paused else []
    return InferenceStatus(
        paused=paused and not waiting,
        mode=pause.mode if paused else None,
        seconds_left=pause.until - now if paused else 0.0,
        waiting_for=waiting,
    )


def _waiting(core: Core) -> list[str]:
    """Gateways that have not acknowledged the pause that is on."""
    current = core.machine.fleet.pause.order_id
    return [node.node_id for node in core.live_nodes() if any(order.id == current for order in node.orders)]
