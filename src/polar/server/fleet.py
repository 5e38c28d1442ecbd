"""Gateways as the server knows them: what they have, what they were told, and the pause that holds for all of them.

A node that comes, comes back or starts anew while a pause is on is told of it, with the time that is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from polar.nodeapi import Order, PollRequest, Workers
from polar.server.needs import amount_of
from polar.server.state import Attempt, ForgottenNode, Node, Pause, Task

FORGET_SECONDS = 24 * 3600.0
"""a node not heard of for so long is no longer listed"""


class StaleEpoch(Exception):
    """A newer gateway has taken this node's name."""


class Fleet:
    def __init__(self, save: Callable[[Node | Pause | ForgottenNode], None]) -> None:
        self.nodes: dict[str, Node] = {}
        self.pause = Pause()
        self._save = save
        self._since = 0.0

    def load(self, nodes: Iterable[Node], pause: Pause) -> None:
        """As they were saved, when the server starts."""
        self.nodes |= {node.node_id: node for node in nodes}
        self.pause = pause

    def restart(self, now: float) -> None:
        """A pause goes on with the time that is left of it, under a new name, because gateways obey an order once."""
        self._since = now
        if self.pause.order_id is not None:
            self.pause.order_id += "+"
            self._save(self.pause)

    # What gateways say

    def hear(self, request: PollRequest, now: float, wall: float) -> tuple[Node, bool]:
        """The node, and whether its gateway has started anew. Raises StaleEpoch."""
        node = self.nodes.get(request.node_id)
        if node is None:
            node = self.nodes[request.node_id] = _node(request)
            self._save(node)
        if request.epoch < node.epoch:
            raise StaleEpoch(request.node_id)
        anew = request.epoch > node.epoch
        if anew:
            node.epoch, node.draining, node.asking = request.epoch, False, None
            self._save(node)
        if anew or node.seen_at is None:
            node.orders = self._standing(node)
        _note(node, request)
        node.seen_at, node.last_heartbeat = now, wall
        node.orders = [self._with_time_left(order, now) for order in node.orders if order.id not in request.acked]
        node.cancels, node.untold = [], []
        return node, anew

    def ask(self, node_id: str, epoch: int, room: Workers, now: float) -> Node | None:
        """The node holds a request for work open. None: it has to poll first. Raises StaleEpoch."""
        node = self.nodes.get(node_id)
        if node is None or node.epoch < epoch or node.seen_at is None:
            return None
        if node.epoch > epoch:
            raise StaleEpoch(node_id)
        node.asking = Workers(init=room.init, run=room.run, postrun=room.postrun)
        node.seen_at = now
        return node

    def leaves(self, node_id: str, epoch: int) -> None:
        """Its gateway is on its way out: it gets nothing more before it asks again."""
        node = self.nodes.get(node_id)
        if node is not None and node.epoch == epoch:
            node.asking = None

    # What gateways are told

    def order(self, order: Order, now: float) -> None:
        """To pause or to go on, for every node, in place of an earlier such order."""
        self._end_pause(now)
        if order.kind == "pause":
            pause = self.pause
            pause.order_id, pause.mode = order.id, order.mode
            pause.began, pause.until = now, now + order.timeout_seconds
            self._save(pause)
        for node in self.nodes.values():
            node.orders = [*_drains(node.orders), order]
            node.untold = [*_drains(node.untold), order]

    def drain(self, node: Node) -> None:
        """The node gets no more sessions, until its gateway starts anew."""
        if not node.draining:
            node.draining = True
            node.orders.append(_drain(node))
            node.untold.append(_drain(node))
            self._save(node)

    def paused(self, now: float) -> bool:
        return self.pause.order_id is not None and now < self.pause.until

    # Leases

    def reserve(self, attempt: Attempt, task: Task) -> None:
        node = self.nodes[attempt.node_id]
        node.leases[attempt.session_id] = attempt
        node.reserved += task.needs.amount

    def release(self, attempt: Attempt, task: Task) -> Node:
        node = self.nodes[attempt.node_id]
        del node.leases[attempt.session_id]
        node.reserved -= task.needs.amount
        return node

    # Time

    def live(self, now: float) -> list[Node]:
        return live_nodes(self.nodes.values(), now)

    def tick(self, now: float) -> None:
        if self.pause.order_id is not None and now >= self.pause.until:
            self._end_pause(now)
            for node in self.nodes.values():
                node.orders = [order for order in node.orders if order.kind != "pause"]
                node.untold = [order for order in node.untold if order.kind != "pause"]
        for node in list(self.nodes.values()):
            if now - max(node.seen_at or 0.0, self._since) > FORGET_SECONDS and not node.leases:
                del self.nodes[node.node_id]
                self._save(ForgottenNode(node_id=node.node_id))

    def stand_still(self, since: float, now: float) -> None:
        """The server was away: it could lease nothing, so that nobody's queue time ran, and no node was unheard of."""
        self.pause.stood += self.pause.clock(now) - self.pause.clock(since)
        self._save(self.pause)
        self._since = now

    def _end_pause(self, now: float) -> None:
        if self.pause.order_id is not None:
            self.pause.stood, self.pause.order_id = now - self.pause.clock(now), None
            self._save(self.pause)

    def _standing(self, node: Node) -> list[Order]:
        drains = [_drain(node)] if node.draining else []
        pause = self.pause
        if pause.order_id is None:
            return drains
        return [*drains, msgspec.convert({"id": pause.order_id, "kind": "pause", "mode": pause.mode}, Order)]

    def _with_time_left(self, order: Order, now: float) -> Order:
        left = max(0.0, self.pause.until - now)
        return msgspec.structs.replace(order, timeout_seconds=left) if order.kind == "pause" else order


def live_nodes(nodes: Iterable[Node], now: float) -> list[Node]:
    """Those heard of within three heartbeats."""
    return [
        node
        for node in nodes
        if node.seen_at is not None and now - node.seen_at <= 3 * node.heartbeat_interval_seconds + 1
    ]


def _node(request: PollRequest) -> Node:
    return Node(
        node_id=request.node_id,
        epoch=request.epoch,
        gateway_url=request.gateway_url,
        workers=request.workers,
        engine=request.engine,
    )


def _note(node: Node, request: PollRequest) -> None:
    node.gateway_url, node.workers, node.metrics = request.gateway_url, request.workers, request.metrics
    node.runtimes, node.harnesses, node.engine = request.runtimes, request.harnesses, request.engine
    node.labels = request.labels
    node.total = amount_of(request.resources.cpus, request.resources.memory_mb, request.resources.gpus)
    node.heartbeat_interval_seconds = request.heartbeat_interval_seconds


def _drain(node: Node) -> Order:
    return Order(id=f"drain-{node.node_id}-{node.epoch}", kind="drain")


def _drains(orders: Sequence[Order]) -> list[Order]:
    return [order for order in orders if order.kind == "drain"]
