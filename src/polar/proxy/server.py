"""The proxy's HTTP side. Whoever calls is an attempt that is open, or gets 401 in the dialect's own shape.

Delivered means: the terminal event, or the whole body, was handed to the socket without error. What a client does after
that does not matter; what it does before (hang up) leaves the call alive for the session's grace.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from typing import Any

import msgspec
from aiohttp import web

from polar.errors import PolarError
from polar.proxy.call import HEAVY_BYTES, Call, aside, planned
from polar.proxy.canonical import Ask, Dialect, Refusal, number_too_large, whole_characters
from polar.proxy.dialects import Route, route_of
from polar.proxy.forms import check_count, in_words
from polar.proxy.session import Session
from polar.proxy.transport import BODY_BYTES, FINAL, is_packed, read_body, unpacked
from polar.sessionlog import Body

Find = Callable[[str | None], Session | None]
"""The session that a key names, given the listener it came in by; None for a key that names none."""


def make_app(find: Find, model: str, *, keep_alive: float, routes: list[web.RouteDef] | None = None) -> web.Application:
    """An app with the proxy's routes, and `routes` before them. A silent stream says something every `keep_alive` s."""
    app = web.Application(client_max_size=BODY_BYTES)
    app.add_routes(routes or [])
    app.router.add_route("*", "/{path:.*}", _Routes(find, model, keep_alive).handle)
    return app


_AGAIN = {"busy": {"Retry-After": "1"}, "server": {}}
"""kinds of refusals that another try may not meet, and what their answers say of that"""


class _Routes:
    def __init__(self, find: Find, model: str, keep_alive: float) -> None:
        self._find = find
        self._model = model
        self._keep_alive = keep_alive

    async def handle(self, request: web.Request) -> web.StreamResponse:
        key, path = _key_and_path(request)
        route = route_of(request.method, path, request.query, request.headers)
        try:
            if path == "/" and request.method in ("GET", "HEAD"):
                return web.Response(text="polar model proxy\n")
            session = self._find(key)
            if session is None:
                raise Refusal("unauthorized", "unknown or ended session key")
            if route.action is None:
                raise Refusal("not_found", f"no such route: {request.method} {path}")
            if route.action in ("models", "model"):
                return self._listed(route, path, session)
            return await self._posted(request, route, path, session)
        except Refusal as refusal:
            return _refused(route.dialect, refusal)

    async def _posted(self, request: web.Request, route: Route, path: str, session: Session) -> web.StreamResponse:
        dialect = route.dialect
        try:
            raw = await read_body(request)
            if is_packed(request):
                raw = await asyncio.to_thread(unpacked, raw)
            heavy = len(raw) > HEAVY_BYTES
            ask = await aside(heavy, _read, dialect, raw, path)
            if ask.images and session.engine.takes_ids:
                ask.messages = in_words(ask.messages)
            if route.action == "count":
                return _json(dialect.count(await _count(session, ask, len(raw))))
            tries = request.headers.get("x-stainless-retry-count", "")
            repeat = tries.isdecimal() and tries.strip("0") != ""
            call = session.call(dialect.name, await aside(heavy, Body, raw), ask, repeat=repeat)
        except Refusal as refusal:
            session.refuse(dialect.name, refusal)
            raise
        with session.following(call):
            if ask.stream:
                return await _stream(request, dialect, call, self._keep_alive)
            return await _whole(request, dialect, call)

    def _listed(self, route: Route, path: str, session: Session) -> web.Response:
        """Models by the names that a harness may know them by."""
        known = dict.fromkeys((self._model, session.attempt.task.agent.model_name))
        names, created = [*known, *(f"{name}-aux" for name in known)], int(time.time())
        if route.action == "models":
            return _json(route.dialect.models(names, created))
        name = path.partition("/models/")[2]
        if name not in names:
            raise Refusal("not_found", f"no such model: {name}")
        return _json(route.dialect.model(name, created))


async def _whole(request: web.Request, dialect: Dialect, call: Call) -> web.StreamResponse:
    while not call.over:
        await call.news(len(call.deltas))
    if call.answer is None:
        assert call.failure is not None, "a call that is over has an answer or a failure"
        raise call.failure
    response = _json(dialect.whole(call.answer))
    await response.prepare(request)
    await response.write_eof()
    call.deliver()
    return response


async def _stream(request: web.Request, dialect: Dialect, call: Call, keep_alive: float) -> web.StreamResponse:
    deltas = await call.news(0, keep_alive)
    if call.failure is not None and not deltas:
        raise call.failure
    response = web.StreamResponse(headers={"Content-Type": dialect.stream_type, "Cache-Control": "no-cache"})
    await response.prepare(request)
    encoder, started, seen = dialect.encoder(call.opening), False, 0
    while True:
        data = b"" if started or not (deltas or call.answer) else encoder.start()
        started = started or bool(data)
        data += b"".join(encoder.delta(delta) for delta in deltas)
        seen += len(deltas)
        if call.over and seen == len(call.deltas):
            break
        await response.write(data or encoder.keep_alive())
        deltas = await call.news(seen, keep_alive)
    if call.answer is None:
        assert call.failure is not None, "a call that is over has an answer or a failure"
        await response.write(data + encoder.error(call.failure))
        await response.write_eof()
        return response
    await response.write(data + encoder.end(call.answer))
    call.deliver()
    await response.write_eof()
    return response


def _read(dialect: Dialect, raw: bytes, path: str) -> Ask:
    body = _document(raw)
    if not isinstance(body, dict):
        raise Refusal("bad_request", "the body must be a JSON object")
    return dialect.parse(body, path)


def _document(raw: bytes) -> Any:
    try:
        return msgspec.json.decode(raw)
    except RecursionError as deep:
        raise Refusal("bad_request", "the body is nested too deeply") from deep
    except msgspec.DecodeError as first:
        # Harnesses cut text in the middle of a surrogate pair; what is left of it becomes a question mark.
        try:
            document = whole_characters(json.loads(raw))
        except (ValueError, RecursionError):
            raise Refusal("bad_request", f"the body is not JSON: {first}") from first
        if place := number_too_large(document):
            raise Refusal("bad_request", f"{place}: the number is not finite or beyond 64 bits") from first
        return document


async def _count(session: Session, ask: Ask, size: int) -> int:
    if session.rendering is None:
        raise Refusal("unsupported", "this engine renders its prompts itself: tokens cannot be counted before")
    await aside(size > HEAVY_BYTES, check_count, ask, size, session.rendering, session.context_length)
    conversation = session.conversation
    try:
        place = await asyncio.to_thread(conversation.place, ask.messages, ask.tools)
        return len((await planned(conversation, place, ask)).ids)
    except PolarError as fault:
        raise Refusal("bad_request", fault.message) from fault


def _refused(dialect: Dialect, refusal: Refusal) -> web.Response:
    status, body = dialect.error(refusal)
    return web.json_response(body, status=status, headers=_AGAIN.get(refusal.kind, FINAL))


def _json(document: dict[str, Any]) -> web.Response:
    return web.Response(body=msgspec.json.encode(document), content_type="application/json")


def _key_and_path(request: web.Request) -> tuple[str | None, str]:
    """The key from the path (/s/KEY/…) or a header, and the path without it."""
    path = request.path
    if path.startswith("/s/"):
        key, _, rest = path[3:].partition("/")
        return key, f"/{rest}"
    headers = request.headers
    scheme, _, bearer = headers.get("Authorization", "").partition(" ")
    key = bearer.strip() if scheme.lower() == "bearer" else ""
    return key or headers.get("x-api-key") or headers.get("x-goog-api-key"), path
