"""From a request to a task: what is refused at submit is refused by name, with the field's path."""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Iterator, Sequence
from hashlib import sha256
from typing import Any
from urllib.parse import urlsplit

from fastapi.exceptions import RequestValidationError

from polar.requests import TaskRequest
from polar.server import placement
from polar.server.needs import needs_of
from polar.server.state import Node, Session, Task


def check(request: TaskRequest, raw: Any, live: Sequence[Node]) -> None:
    """Raises RequestValidationError naming every field that is wrong."""
    mistakes = [*_not_finite(raw, ("body",)), *_unknown_names(request, live)]
    url = request.callback_url
    if url is not None and (urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname):
        mistakes.append((("body", "callback_url"), f"must be an http or https URL, not {url[:100]!r}"))
    if mistakes:
        raise RequestValidationError([{"loc": loc, "msg": msg, "type": "value_error"} for loc, msg in mistakes])


def digest(request: TaskRequest) -> str:
    """Equal for equal tasks, whatever the order of keys; callback_url aside."""
    document = request.model_dump(mode="json", exclude_defaults=True, exclude={"callback_url"})
    return sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()


def new_task(request: TaskRequest, clock: float, wall: float) -> Task:
    """`clock` is the queue clock, `wall` the time of day."""
    source = request.metadata.get("source")
    runtime, agent = request.runtime, request.agent
    slug = re.sub(r"[^A-Za-z0-9._-]", "_", request.task_id)[:80]
    return Task(
        task_id=request.task_id,
        digest=digest(request),
        request=request.model_dump_json(),
        priority=request.dispatch_priority,
        max_attempts=request.max_attempts,
        queue_seconds=request.budgets.queue,
        enough=request.early_stop_min_usable_sessions,
        runtime=runtime.backend if runtime is not None else None,
        harness=agent.harness or agent.import_path or "",
        model=agent.model_name,
        needs=needs_of(request),
        graded=request.evaluator is not None,
        callback_url=request.callback_url,
        callback_format=request.callback_format,
        num_samples=request.num_samples,
        created_at=wall,
        updated_at=wall,
        source=source if isinstance(source, str) else None,
        sessions=[
            Session(
                session_id=f"{slug}-s{index}-{secrets.token_hex(4)}",
                task_id=request.task_id,
                index=index,
                queued_at=clock,
            )
            for index in range(request.num_samples)
        ],
    )


Mistake = tuple[tuple[str | int, ...], str]


def _not_finite(value: Any, path: tuple[str | int, ...]) -> Iterator[Mistake]:
    if isinstance(value, float) and not math.isfinite(value):
        yield path, "must be a finite number"
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _not_finite(item, (*path, key))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _not_finite(item, (*path, index))


def _unknown_names(request: TaskRequest, live: Sequence[Node]) -> Iterator[Mistake]:
    from polar.trajectory import BUILDERS

    yield from _unknown("builder", ("builder", "strategy"), request.builder.strategy, BUILDERS)
    if request.evaluator is not None:
        from polar.evaluators import EVALUATORS

        yield from _unknown("evaluator", ("evaluator", "strategy"), request.evaluator.strategy, EVALUATORS)
    if not live:
        return
    harnesses = {name for node in live for name in node.harnesses}
    yield from _unknown("harness", ("agent", "harness"), request.agent.harness, harnesses)
    runtimes = {name for node in live for name in node.runtimes}
    if request.runtime is not None:
        yield from _unknown("runtime", ("runtime", "backend"), request.runtime.backend, runtimes)
    for path, problem in placement.too_much(request, live):
        yield ("body", *path), problem


def _unknown(kind: str, path: tuple[str, ...], name: str | None, known: Any) -> Iterator[Mistake]:
    if name is not None and ":" not in name and name not in known:
        yield ("body", *path), f"unknown {kind} {name!r}: known are {', '.join(sorted(known))}"
