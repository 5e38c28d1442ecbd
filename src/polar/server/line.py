"""Which waiting session goes to which node: priority first, then a session from each task in turn.

A session that does not fit now is passed over by those behind it, but not for ever: when those that ask the same have
found no room for `PATIENCE_SECONDS`, the node that has most of what the first of them needs takes nothing from behind
it in the line until it has been placed. Those that ask the same hold one node at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

from polar.server.needs import Amount, Needs, most
from polar.server.placement import can_run, could_take
from polar.server.state import Node, Session, Task

PATIENCE_SECONDS = 30.0
Place = tuple[int, int]
"""-priority and turn: the smaller goes first; no two are equal"""


class Kind:
    """Tasks with waiting sessions that ask the same of a node, each once, in order."""

    def __init__(self) -> None:
        self.tried = False
        """No node that is open took it, but for those that have changed since."""
        self.stuck_since: float | None = None
        self.holds: str | None = None
        self._heap: list[tuple[Place, Task]] = []

    def add(self, place: Place, task: Task) -> None:
        heapq.heappush(self._heap, (place, task))
        self.tried = False

    def first(self) -> tuple[Place, Task] | None:
        """Tasks whose last waiting session has gone leave the line here."""
        while self._heap:
            task = self._heap[0][1]
            while task.queue and not task.queue[0].queued:
                task.queue.popleft()
            if task.queue:
                return self._heap[0]
            self._leave()
        return None

    def take(self) -> Session:
        """The first one's next session."""
        return self._leave().queue.popleft()

    def _leave(self) -> Task:
        task = heapq.heappop(self._heap)[1]
        task.offered = False
        return task


class Line:
    """What has not changed since it was last looked at in vain is not looked at again."""

    def __init__(self) -> None:
        self._kinds: dict[tuple[str, str | None, Needs], Kind] = {}
        self._turns = count()
        self._held: dict[str, Kind] = {}
        self._offered = False
        self._changed: set[str] = set()

    def offer(self, task: Task) -> None:
        """Puts the task behind those of its priority, if it has a session to offer."""
        if task.queue and not task.offered:
            task.offered = self._offered = True
            kind = self._kinds.setdefault((task.harness, task.runtime, task.needs), Kind())
            kind.add((-task.priority, next(self._turns)), task)

    def look_at(self, node: Node) -> None:
        """The node may take what it could not take before."""
        self._changed.add(node.node_id)

    def matches(self, nodes: Iterable[Node], now: float) -> Iterator[tuple[Session, Node]]:
        """Pairs of a waiting session and the node that is to have it; the caller lowers the node's room before it
        asks for the next. Tasks that no node can take keep their places."""
        while self._changed or self._offered:
            changed, self._changed = self._changed, set()
            open_nodes = [node for node in nodes if node.open]
            if not open_nodes:
                return
            self._offered = False
            yield from self._round(open_nodes, changed, now)

    def _round(self, open_nodes: list[Node], changed: set[str], now: float) -> Iterator[tuple[Session, Node]]:
        news = [node for node in open_nodes if node.node_id in changed]
        heads = self._heads(most(node.free for node in news) if news else None)
        able: dict[Kind, list[Node]] = {}
        while heads and any(node.open for node in open_nodes):
            place, kind = heapq.heappop(heads)
            first = kind.first()
            assert first is not None
            if kind not in able:
                able[kind] = [node for node in (news if kind.tried else open_nodes) if can_run(node, first[1])]
            node = self._best(able[kind], kind, place, first[1])
            if node is None:
                kind.tried = True
                kind.stuck_since = now if kind.stuck_since is None else kind.stuck_since
                continue
            self._let_go(kind)
            kind.stuck_since = None
            yield kind.take(), node
            self.offer(first[1])
            if (following := kind.first()) is not None:
                heapq.heappush(heads, (following[0], kind))

    def _heads(self, room: Amount | None) -> list[tuple[Place, Kind]]:
        """Of the kinds to look at: those not tried yet, and those that may find what they need in `room`."""
        heads = []
        for key, kind in list(self._kinds.items()):
            first = kind.first()
            if first is None:
                self._let_go(kind)
                del self._kinds[key]
            elif not kind.tried or (room is not None and key[2].amount.within(room)):
                heads.append((first[0], kind))
        heapq.heapify(heads)
        return heads

    def _best(self, able: Iterable[Node], kind: Kind, place: Place, task: Task) -> Node | None:
        """A retried session goes elsewhere where there is an elsewhere; then the node with most room to run."""
        failed = {attempt.node_id for attempt in task.queue[0].attempts}
        asked = task.needs.amount

        def merit(node: Node) -> tuple[bool, int, int]:
            assert node.asking is not None
            return node.node_id not in failed, node.asking.run, node.asking.init

        free = (node for node in able if node.open and asked.within(node.free))
        return max((node for node in free if not self._is_held(node, kind, place)), key=merit, default=None)

    # Holding a node

    def hold(self, live: Sequence[Node], now: float) -> None:
        """Called from time to time: nodes are held for those that have waited long, and let go where that is vain."""
        taking = {node.node_id: node for node in live if node.engine.healthy and not node.draining}
        for node_id, kind in list(self._held.items()):
            first = kind.first()
            if first is None or node_id not in taking or not could_take(taking[node_id], first[1]):
                self._let_go(kind)
        self._changed |= self._held.keys()
        for _, kind in sorted(self._overdue(now), key=lambda entry: entry[0]):
            unheld = [node for name, node in taking.items() if name not in self._held]
            if not unheld:
                return
            self._hold_best(kind, unheld)

    def _overdue(self, now: float) -> Iterator[tuple[Place, Kind]]:
        for (_, _, needs), kind in self._kinds.items():
            stuck = kind.stuck_since is not None and now - kind.stuck_since >= PATIENCE_SECONDS
            if stuck and needs.amount and kind.holds is None and (first := kind.first()) is not None:
                yield first[0], kind

    def _hold_best(self, kind: Kind, nodes: Sequence[Node]) -> None:
        first = kind.first()
        assert first is not None
        task = first[1]
        able = [node for node in nodes if could_take(node, task)]
        if able:
            best = max(able, key=lambda node: task.needs.amount.share(node.free))
            kind.holds = best.node_id
            self._held[best.node_id] = kind

    def _is_held(self, node: Node, kind: Kind, place: Place) -> bool:
        holder = self._held.get(node.node_id)
        first = holder.first() if holder is not None and holder is not kind else None
        return first is not None and first[0] < place

    def _let_go(self, kind: Kind) -> None:
        if kind.holds is not None:
            del self._held[kind.holds]
            self._changed.add(kind.holds)
            kind.holds = None
