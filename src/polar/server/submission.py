"""From a request to a task: what is refused at submit is refused by name, with the field's path."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from hashlib import sha256
from typing import Any
from urllib.parse import quote, urlsplit

from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from polar.errors import WrongFields
from polar.requests import TaskRequest, ignored_fields
from polar.server import bodies, placement
from polar.server.needs import needs_of
from polar.server.state import Node, Session, Task

_SAFE = "!#$&'()*+/:;<=>?@[]^`{|}~"
_PLUG_IN = re.compile(r"[^\W\d][\w.]*:[^\W\d][\w.]*")
_HOST = re.compile(r"[\w.:%-]{1,253}")
_MOST_IGNORED = 4000
"""characters; a header is no place for more"""


def read(body: bytes) -> tuple[TaskRequest, str]:
    """The task, and the names of the fields that nobody knows, fit for a header. Raises RequestValidationError."""
    raw = bodies.parse(body)
    try:
        request = TaskRequest.model_validate(raw)
    except ValidationError as error:
        raise RequestValidationError([item | {"loc": ("body", *item["loc"])} for item in error.errors()]) from error
    ignored = ", ".join(quote(name, safe=_SAFE) or "(empty)" for name in ignored_fields(raw))
    return request, ignored if len(ignored) <= _MOST_IGNORED else f"{ignored[:_MOST_IGNORED]}..."


def check(request: TaskRequest, live: Sequence[Node]) -> None:
    """Raises RequestValidationError naming every field that is wrong."""
    mistakes = [*_wrong_plug_ins(request), *_unknown_names(request, live), *_wrong_settings(request)]
    if request.callback_url is not None and not _is_url(request.callback_url):
        url = request.callback_url[:100]
        mistakes.append((("callback_url",), f"must be an http or https URL, not {url!r}"))
    if mistakes:
        raise bodies.refusal(mistakes)


def _is_url(text: str) -> bool:
    try:
        url = urlsplit(text)
        host = _HOST.fullmatch(url.hostname or "") is not None
        return url.scheme in ("http", "https") and host and url.port != 0 and text.isprintable()
    except ValueError:
        return False


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


def _wrong_plug_ins(request: TaskRequest) -> Iterator[bodies.Mistake]:
    runtime, evaluator = request.runtime, request.evaluator
    named = [
        (("agent", "import_path"), request.agent.import_path),
        (("runtime", "import_path"), runtime.import_path if runtime is not None else None),
        (("builder", "strategy"), _own(request.builder.strategy)),
        (("evaluator", "strategy"), _own(evaluator.strategy) if evaluator is not None else None),
    ]
    for path, name in named:
        if name is not None and not _PLUG_IN.fullmatch(name):
            yield path, f"must be like package.module:Class, not {name[:100]!r}"


def _own(strategy: str) -> str | None:
    """The strategy, if it is a plug-in of the caller's own."""
    return strategy if ":" in strategy else None


def _unknown_names(request: TaskRequest, live: Sequence[Node]) -> Iterator[bodies.Mistake]:
    from polar.trajectory import BUILDERS

    if not _own(request.builder.strategy):
        yield from _unknown("builder", ("builder", "strategy"), request.builder.strategy, BUILDERS)
    if request.evaluator is not None and not _own(request.evaluator.strategy):
        from polar.evaluators import EVALUATORS

        yield from _unknown("evaluator", ("evaluator", "strategy"), request.evaluator.strategy, EVALUATORS)
    if not live:
        return
    harnesses = {name for node in live for name in node.harnesses}
    yield from _unknown("harness", ("agent", "harness"), request.agent.harness, harnesses)
    runtimes = {name for node in live for name in node.runtimes}
    if request.runtime is not None:
        yield from _unknown("runtime", ("runtime", "backend"), request.runtime.backend, runtimes)
    yield from placement.too_much(request, live)


def _wrong_settings(request: TaskRequest) -> Iterator[bodies.Mistake]:
    """What the gateway would refuse in every session; of a user's own plug-ins only it can know."""
    for make in _built_in(request):
        try:
            make()
        except WrongFields as fault:
            yield from fault.mistakes


def _built_in(request: TaskRequest) -> Iterator[Callable[[], object]]:
    from polar.evaluators import EVALUATORS, load_evaluator
    from polar.harnesses import HARNESSES, load_harness
    from polar.runtimes import RUNTIMES, load_runtime
    from polar.runtimes.options import Options
    from polar.trajectory import BUILDERS, load_builder

    agent, runtime, builder, evaluator = request.agent, request.runtime, request.builder, request.evaluator
    if agent.harness in HARNESSES:
        yield lambda: load_harness(agent)
    if builder.strategy in BUILDERS:
        yield lambda: load_builder(builder)
    if evaluator is not None and evaluator.strategy in EVALUATORS:
        yield lambda: load_evaluator(evaluator)
    if runtime is not None and runtime.backend in RUNTIMES:
        yield lambda: load_runtime(runtime)
    elif runtime is not None and not runtime.backend and not runtime.import_path:  # which one, the gateway says
        yield lambda: Options.of(runtime)


def _unknown(kind: str, path: tuple[str, ...], name: str | None, known: Any) -> Iterator[bodies.Mistake]:
    if name is not None and name not in known:
        yield path, f"unknown {kind} {name[:100]!r}: known are {', '.join(sorted(known))}"
