"""Which nodes can carry a task's sessions out, and in words what is missing where none can."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from polar.requests import TaskRequest
from polar.server.needs import Amount, Needs, needs_of
from polar.server.state import Node, Task


def can_run(node: Node, task: Task) -> bool:
    """Whether the node has the task's harness and runtime (a module:Class needs no name there) and its labels."""
    return (
        (":" in task.harness or task.harness in node.harnesses)
        and (task.runtime is None or task.runtime in node.runtimes)
        and has_labels(node, task.needs)
    )


def has_labels(node: Node, needs: Needs) -> bool:
    return all(node.labels.get(name) == value for name, value in needs.labels)


def could_take(node: Node, task: Task) -> bool:
    """Whether a session of the task fits the node when nothing else is there."""
    return can_run(node, task) and task.needs.amount.within(node.total)


def too_much(request: TaskRequest, live: Sequence[Node]) -> Iterator[tuple[tuple[str, ...], str]]:
    """What it asks for that no live node has: the field, and what is wrong. Nothing while no node is there."""
    needs = needs_of(request)
    labelled = [node for node in live if has_labels(node, needs)]
    if live and not labelled:
        yield ("node_labels",), f"no gateway has {_labels(needs)}: {_known_labels(needs, live)}"
    if not labelled or any(needs.amount.within(node.total) for node in labelled):
        return
    fresh = request.evaluator is not None and request.evaluator.refresh_runtime
    session = "a session with its fresh evaluation sandbox" if fresh else "a session"
    alone = 0
    for field, part in (("cpus", "millicpus"), ("memory_mb", "memory_mb"), ("gpus", "gpus")):
        asked = _only(needs.amount, part)
        biggest = max(labelled, key=lambda node: getattr(node.total, part))
        if not asked.within(biggest.total):
            alone += 1
            has = _only(biggest.total, part) or "none"
            yield ("runtime", field), f"{session} needs {asked}; the biggest gateway, {biggest.node_id}, has {has}"
    if not alone:
        nodes = "; ".join(f"{node.node_id} has {node.total}" for node in labelled)
        yield ("runtime",), f"{session} needs {needs.amount} on one gateway; {nodes}"


def waiting_for(task: Task, live: Sequence[Node], *, full: bool) -> str | None:
    """What has to change before a gateway can take the task's waiting sessions; None where it is only their turn."""
    if task.status.terminal or not any(session.queued for session in task.sessions):
        return None
    if full:
        return "room on the rollout server's disk"
    if not live:
        return "a gateway: none is connected"
    able = [node for node in live if can_run(node, task)]
    fitting = [node for node in able if could_take(node, task)]
    if not fitting:
        return _missing(task, live, able)
    taking = [node for node in fitting if not node.draining]
    if not taking:
        return f"a gateway: {_names(fitting)} drained"
    healthy = [node for node in taking if node.engine.healthy]
    if not healthy:
        return "a healthy engine: " + "; ".join(
            f"{node.node_id}: {node.engine.problem or 'not ready'}" for node in taking
        )
    return _room(task, healthy)


def _room(task: Task, nodes: Sequence[Node]) -> str | None:
    needs = task.needs.amount
    if any(needs.within(node.free) for node in nodes):
        return None
    most = max(nodes, key=lambda node: needs.share(node.free))
    return f"room for {needs}: {most.node_id} has {most.free} free of {most.total}"


def _missing(task: Task, live: Sequence[Node], able: Sequence[Node]) -> str:
    for kind, wanted, known in (
        ("harness", task.harness, {name for node in live for name in node.harnesses}),
        ("runtime", task.runtime, {name for node in live for name in node.runtimes}),
    ):
        if wanted is not None and ":" not in wanted and wanted not in known:
            return f"a gateway with the {kind} {wanted!r}: {_names(live)} has {', '.join(sorted(known)) or 'none'}"
    if not any(has_labels(node, task.needs) for node in live):
        return f"a gateway with {_labels(task.needs)}: {_known_labels(task.needs, live)}"
    if able:
        biggest = max(able, key=lambda node: task.needs.amount.share(node.total))
        return f"a gateway with {task.needs.amount}: {biggest.node_id} has {biggest.total}"
    wanted = f"the harness {task.harness!r}, the runtime {task.runtime!r}"
    return "a gateway with " + " and ".join([wanted, *([_labels(task.needs)] if task.needs.labels else [])])


def _labels(needs: Needs) -> str:
    return "the labels " + ", ".join(f"{name}={value}" for name, value in needs.labels)


def _known_labels(needs: Needs, live: Sequence[Node]) -> str:
    """The values that there are of the labels asked for."""
    parts = []
    for name, _ in needs.labels:
        values = sorted({node.labels[name] for node in live if name in node.labels})
        parts.append(f"{name} is {' or '.join(values)}" if values else f"none has {name}")
    return ", ".join(parts)


def _names(nodes: Sequence[Node]) -> str:
    return ", ".join(node.node_id for node in nodes)


def _only(amount: Amount, part: str) -> Amount:
    return Amount(**{part: getattr(amount, part)})
