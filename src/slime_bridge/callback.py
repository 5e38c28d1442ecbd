"""The listener for finished tasks: an unguessable address, and an answer to every payload, also to a malformed one."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import msgspec
from aiohttp import web

from polar.codec import from_json, from_msgpack
from polar.errors import ConfigError
from polar.records import TaskResult

PATH = "/callback/task_result"
LARGEST_BODY = 4 << 30
CLOSE_SECONDS = 1.0


@asynccontextmanager
async def listening(host: str, arrived: Callable[[TaskResult], None]) -> AsyncIterator[str]:
    """Yields the callback_url. Raises ConfigError where `host` is none of this machine's addresses."""
    token = secrets.token_urlsafe(24)

    async def receive(request: web.Request) -> web.Response:
        given = request.query.get("token", "").encode(errors="surrogateescape")
        if not hmac.compare_digest(given, token.encode()):
            return web.json_response({"ok": False, "reason": "wrong token"}, status=403)
        body, packed = await request.read(), request.content_type == "application/msgpack"
        try:
            result = from_msgpack(body, TaskResult) if packed else from_json(body, TaskResult)
        except msgspec.DecodeError as error:
            return web.json_response({"ok": False, "reason": str(error)})
        if not result.status.terminal:
            return web.json_response({"ok": False, "reason": f"the task is {result.status.value}"})
        arrived(result)
        return web.json_response({"ok": True})

    app = web.Application(client_max_size=LARGEST_BODY)
    app.router.add_post(PATH, receive)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=CLOSE_SECONDS)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, 0)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"polar_callback_host: cannot listen on {host}: {error.strerror or error}") from error
        port = runner.addresses[0][1]
        name = f"[{host}]" if ":" in host else host
        yield f"http://{name}:{port}{PATH}?token={token}"
    finally:
        await runner.cleanup()
