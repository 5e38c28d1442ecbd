"""Who may call, and how much they may send: decided before a request's body is read.

Trainer-facing routes are open only on loopback, with no token set and no node that offers the `local` runtime, and
never to a web page; everything else needs the control token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import TYPE_CHECKING

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polar.config import TOKEN_HEADER, TOKEN_VARIABLE

if TYPE_CHECKING:
    from polar.server.core import Core

BODY_BYTES, LOG_BYTES = 256 << 20, 8 << 30


class Guard:
    def __init__(self, app: ASGIApp, core: Core) -> None:
        self._app = app
        self._core = core
        self._token = core.token.encode()
        self._open = is_loopback(core.settings.host) and not os.environ.get(TOKEN_VARIABLE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        most = LOG_BYTES if scope["path"].endswith("/log") else BODY_BYTES
        refusal = self._refusal(scope["path"], headers)
        declared = headers.get("content-length", "0")
        if refusal is None and declared.isdigit() and int(declared) > most:
            refusal = (413, f"the body is larger than {most} bytes")
        if refusal is not None:
            await JSONResponse({"detail": refusal[1]}, refusal[0])(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, most), send)

    def _refusal(self, path: str, headers: Headers) -> tuple[int, str] | None:
        given = headers.get(TOKEN_HEADER, "").encode()
        if hmac.compare_digest(given, self._token):
            return None
        where = f"{self._core.files.folder / 'control_token'} or {TOKEN_VARIABLE}"
        if given:
            return 401, f"wrong control token: {TOKEN_HEADER} must carry the one in {where}"
        if path.startswith("/node/") or not self._open or self._offers_local():
            return 401, f"this needs the control token: send {TOKEN_HEADER} with the one in {where}"
        if "origin" in headers:
            return 403, f"web pages may not call this server without {TOKEN_HEADER}"
        return None

    def _offers_local(self) -> bool:
        return any("local" in node.runtimes for node in self._core.live_nodes())


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _bounded(receive: Receive, most: int) -> Receive:
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise HTTPException(413, f"the body is larger than {most} bytes")
        return message

    return bounded
