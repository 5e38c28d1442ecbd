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


async def pause(core: Core, mode: Literal["drain", "abort"], seconds: float) -> str | None:
    """None when every gateway has paused; else why not: one did not in time, and all go on again, or another order
    came between."""
    order = Order(id=secrets.token_hex(8), kind="pause", mode=mode, timeout_seconds=seconds)
    pause = core.machine.fleet.pause
    core.machine.fleet.order(order, core.now())
    until = pause.until
    waiting: list[str] = []
    await core.settle()
    while pause.order_id == order.id:
        if not (waiting := _waiting(core)):
            return None
        if core.now() >= until:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    if pause.order_id in (order.id, None) and core.now() >= until:
        await resume(core)
        return f"not every gateway paused within {seconds:g} s: {', '.join(waiting)} did not; all go on again"
    return "another pause or resume came between"


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
    """Gateways that have not acknowledged the pause that is on. A silent one that holds leases may be cut off from here
    alone, and call its engine all the same."""
    fleet = core.machine.fleet
    live = {node.node_id for node in core.live_nodes()}
    asked = [node for node in fleet.nodes.values() if node.leases or node.node_id in live]
    return [node.node_id for node in asked if any(order.id == fleet.pause.order_id for order in node.orders)]
