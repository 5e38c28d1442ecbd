"""Who may call, and how much they may send: decided before a request's body is read.

Trainer-facing routes are open only on loopback, with no token set and no node that offers the `local` runtime, and
never to a web page, also not to one whose own name leads here; everything else needs the control token.
"""

from __future__ import annotations

import hmac
import ipaddress
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from fastapi import HTTPException
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from polar.config import TOKEN_HEADER, TOKEN_VARIABLE, RolloutSettings

if TYPE_CHECKING:
    from polar.server.core import Core

TASK_BYTES, RESULT_BYTES, LOG_BYTES = 64 << 20, 256 << 20, 8 << 30


def needs_token(settings: RolloutSettings) -> bool:
    """Whether trainer-facing routes need the control token, whatever the nodes offer."""
    return not is_loopback(settings.host) or bool(os.environ.get(TOKEN_VARIABLE))


class Guard:
    def __init__(self, app: ASGIApp, core: Core) -> None:
        self._app = app
        self._core = core
        self._token = core.token.encode()
        self._open = not needs_token(core.settings)
        self._public_name = _name(urlsplit(core.settings.public_url or "").netloc)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        most = _most_bytes(scope["path"])
        refusal = self._refusal(scope["path"], headers)
        declared = headers.get("content-length", "0")
        if refusal is None and declared.isdigit() and int(declared) > most:
            refusal = (413, _too_large(most))
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
        name = _name(headers.get("host", "localhost"))
        if not self._is_own(name):
            advice = f"call it by its address, set rollout.public_url, or send {TOKEN_HEADER}"
            return 403, f"this server does not know itself as {name[:100]!r}: {advice}"
        return None

    def _is_own(self, name: str) -> bool:
        """A web page that leads its own name to this machine is told by that name."""
        return name in ("localhost", self._public_name) or name.endswith(".localhost") or _is_address(name)

    def _offers_local(self) -> bool:
        return any("local" in node.runtimes for node in self._core.live_nodes())


def is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _name(netloc: str) -> str:
    """Of `name:port` or `[address]:port`; what cannot be read is no name of ours."""
    try:
        return urlsplit(f"//{netloc}").hostname or ""
    except ValueError:
        return netloc


def _most_bytes(path: str) -> int:
    if not path.startswith("/node/"):
        return TASK_BYTES
    return LOG_BYTES if path.endswith("/log") else RESULT_BYTES


def _too_large(most: int) -> str:
    return f"the body is larger than {most} bytes"


def _bounded(receive: Receive, most: int) -> Receive:
    taken = 0

    async def bounded() -> Message:
        nonlocal taken
        message = await receive()
        taken += len(message.get("body", b""))
        if taken > most:
            raise HTTPException(413, _too_large(most))
        return message

    return bounded
