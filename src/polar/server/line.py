"""Which waiting session goes to which node: priority first, then a session from each task in turn."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import count

from polar.server.state import Node, Session, Task


class Line:
    """Tasks with waiting sessions, each once."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, str]] = []
        self._turns = count()

    def offer(self, task: Task) -> None:
        """Puts the task behind those of its priority, if it has a session to offer."""
        if task.queue and not task.offered:
            task.offered = True
            heapq.heappush(self._heap, (-task.priority, next(self._turns), task.task_id))

    def matches(self, tasks: Mapping[str, Task], nodes: Iterable[Node]) -> Iterator[tuple[Session, Node]]:
        """Pairs of a waiting session and the node that is to have it; the caller lowers the node's room before it
        asks for the next. Tasks that no node can take keep their places."""
        nodes = list(nodes)
        passed: list[tuple[int, int, str]] = []
        while self._heap and any(is_open(node) for node in nodes):
            entry = heapq.heappop(self._heap)
            task = tasks.get(entry[2])
            if task is None:
                continue
            session = _first_waiting(task)
            node = _best(nodes, task, session) if session is not None else None
            if session is not None and node is None:
                passed.append(entry)
                continue
            task.offered = False
            if session is not None and node is not None:
                task.queue.popleft()
                yield session, node
                self.offer(task)
        for entry in passed:
            heapq.heappush(self._heap, entry)


def is_open(node: Node) -> bool:
    return node.asking is not None and node.asking.init > 0 and node.engine.healthy and not node.draining


def can_run(node: Node, task: Task) -> bool:
    """Whether the node has the task's harness and runtime; a module:Class needs no name there."""
    return (":" in task.harness or task.harness in node.harnesses) and (
        task.runtime is None or task.runtime in node.runtimes
    )


def live_nodes(nodes: Iterable[Node], now: float) -> list[Node]:
    """Those heard of within three heartbeats."""
    return [
        node
        for node in nodes
        if node.seen_at is not None and now - node.seen_at <= 3 * node.heartbeat_interval_seconds + 1
    ]


def _first_waiting(task: Task) -> Session | None:
    while task.queue and not task.queue[0].queued:
        task.queue.popleft()
    return task.queue[0] if task.queue else None


def _best(nodes: list[Node], task: Task, session: Session) -> Node | None:
    """A retried session goes elsewhere where there is an elsewhere; then the node with most room to run."""
    failed = {attempt.node_id for attempt in session.attempts}

    def merit(node: Node) -> tuple[bool, int, int]:
        assert node.asking is not None
        return node.node_id not in failed, node.asking.run, node.asking.init

    return max((node for node in nodes if is_open(node) and can_run(node, task)), key=merit, default=None)
