"""The gateway's control routes, for people and operators. They stand on the shared listener only, never on the one
inside a sandbox, and need the control token (/health alone does not)."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiohttp import web

from polar.codec import to_json
from polar.config import TOKEN_HEADER
from polar.sessionlog import read

if TYPE_CHECKING:
    from polar.gateway.node import Gateway

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def control_routes(gateway: Gateway) -> list[web.RouteDef]:
    routes = _Routes(gateway)
    guarded = [
        web.get("/sessions", routes.sessions),
        web.get("/sessions/{id}", routes.session),
        web.get("/sessions/{id}/completions", routes.completions),
        web.delete("/sessions/{id}", routes.cancel),
        web.post("/admin/inference/pause", routes.pause),
        web.post("/admin/inference/resume", routes.resume),
        web.get("/admin/inference/status", routes.status),
    ]
    health = web.get("/health", routes.health)
    return [health] + [web.route(route.method, route.path, routes.guard(route.handler)) for route in guarded]


class _Routes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def guard(self, handler: Any) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            given = request.headers.get(TOKEN_HEADER, "").encode(errors="surrogateescape")
            if not hmac.compare_digest(given, self._gateway.token.encode()):
                return _answer({"detail": f"control token missing or wrong: send it as {TOKEN_HEADER}"}, 401)
            response: web.StreamResponse = await handler(request)
            return response

        return guarded

    async def health(self, request: web.Request) -> web.StreamResponse:
        gateway = self._gateway
        engine = gateway.watch.state if gateway.watch else None
        return _answer(
            {"status": "ok", "node_id": gateway.node.id, "engine": engine, "draining": gateway.orders.draining}
        )

    async def sessions(self, request: web.Request) -> web.StreamResponse:
        return _answer({"sessions": [_describe(item) for item in self._gateway.sessions.values()]})

    async def session(self, request: web.Request) -> web.StreamResponse:
        return _answer(_describe(self._find(request)))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        log = read(self._find(request).log_path)
        return _answer({"completions": [_completion(call) for call in log.calls]})

    async def cancel(self, request: web.Request) -> web.StreamResponse:
        session = self._find(request)
        session.stop("cancelled")
        return _answer(_describe(session))

    async def pause(self, request: web.Request) -> web.StreamResponse:
        mode = request.query.get("mode", "drain")
        try:
            seconds = float(request.query.get("timeout_seconds", "300"))
        except ValueError:
            return _answer({"detail": "timeout_seconds must be a number of seconds"}, 422)
        if mode not in ("drain", "abort"):
            return _answer({"detail": "mode must be drain or abort"}, 422)
        proxy = self._proxy()
        if not await proxy.pause(mode, seconds):
            return _answer({"detail": f"calls in flight did not end within {seconds:g} s: resumed"}, 504)
        return _answer(proxy.status())

    async def resume(self, request: web.Request) -> web.StreamResponse:
        self._proxy().resume()
        return _answer(self._proxy().status())

    async def status(self, request: web.Request) -> web.StreamResponse:
        return _answer(self._proxy().status())

    def _proxy(self) -> Any:
        assert self._gateway.watch is not None
        return self._gateway.watch.proxy

    def _find(self, request: web.Request) -> Any:
        wanted = request.match_info["id"]
        for session in self._gateway.sessions.values():
            if session.lease.session_id == wanted:
                return session
        raise web.HTTPNotFound(text='{"detail": "Session not found"}', content_type="application/json")


def _describe(session: Any) -> dict[str, Any]:
    return {
        "session_id": session.lease.session_id,
        "task_id": session.task.task_id,
        "attempt": session.lease.attempt,
        "status": session.stage,
        "sampled_tokens": session.sampled,
    }


def _completion(call: Any) -> dict[str, Any]:
    return {
        "call": call.number,
        "model": call.opened.model,
        "dialect": call.opened.dialect,
        "prompt_tokens": call.prompt_length,
        "sampled_tokens": len(call.ids),
        "finish_reason": call.finished.finish_reason if call.finished else None,
        "delivered": call.delivered,
        "message": call.finished.message if call.finished else None,
    }


def _answer(document: Any, status: int = 200) -> web.Response:
    return web.Response(body=to_json(document), status=status, content_type="application/json")
