"""What comes below the APIs: bodies within a bound, however they are packed, and what is no HTTP told as an error that
every API's clients can read. Nothing a client sends puts a traceback into the log.
"""

from __future__ import annotations

import zlib
from typing import Any

import structlog
from aiohttp import ClientConnectionResetError, web
from aiohttp.http_exceptions import BadHttpMessage

from polar.proxy.canonical import Refusal

BODY_BYTES = 64 << 20
"""unpacked: a million tokens of text are up to 8 MB, and pictures of one request up to 50 MB with the providers"""
HEADER_BYTES = 64 << 10
# Both official SDKs obey it: what would be refused again is not asked again.
FINAL = {"x-should-retry": "false"}
_ENCODINGS = ("", "identity", "gzip", "x-gzip", "deflate")
_ZLIB_OR_GZIP = zlib.MAX_WBITS | 32
log = structlog.get_logger("polar.proxy")


async def read_body(request: web.Request) -> bytes:
    """The body as it was sent; `unpacked` gives what it says. Raises Refusal."""
    if (encoding := _encoding(request)) not in _ENCODINGS:
        known = "gzip, deflate or none"
        raise Refusal("unsupported", f"Content-Encoding: {encoding!r} is not read here: send the body with {known}")
    if (request.content_length or 0) > BODY_BYTES:
        raise _too_large()
    try:
        return await request.read()
    except web.HTTPRequestEntityTooLarge as large:
        raise _too_large() from large
    except (BadHttpMessage, web.RequestPayloadError) as error:
        raise Refusal("bad_request", f"the body cannot be read: {type(error).__name__}") from error


def is_packed(request: web.Request) -> bool:
    return _encoding(request) not in ("", "identity")


def unpacked(packed: bytes) -> bytes:
    """Never more than the bound is held. Raises Refusal."""
    body, rest = bytearray(), packed
    while rest:
        member = zlib.decompressobj(_ZLIB_OR_GZIP)
        try:
            body += member.decompress(rest, BODY_BYTES + 1 - len(body))
        except zlib.error as error:
            raise _not_packed() from error
        if len(body) > BODY_BYTES:
            raise _too_large()
        if not member.eof:
            raise _not_packed()
        rest = member.unused_data
    return bytes(body)


def _encoding(request: web.Request) -> str:
    return request.headers.get("Content-Encoding", "").strip().lower()


def _too_large() -> Refusal:
    return Refusal("too_large", f"the body is larger than {BODY_BYTES >> 20} MiB (unpacked)")


def _not_packed() -> Refusal:
    return Refusal("bad_request", "the body is not what its Content-Encoding says")


class Runner(web.AppRunner):
    """Bodies come as they were sent, and errors below the app are JSON."""

    def __init__(self, app: web.Application, **options: Any) -> None:
        bounds: dict[str, Any] = {"max_line_size": HEADER_BYTES, "max_field_size": HEADER_BYTES}
        super().__init__(app, auto_decompress=False, access_log=None, **bounds, **options)

    async def _make_server(self) -> web.Server:
        made = await super()._make_server()
        return _Server(made.request_handler, request_factory=made.request_factory, **self._kwargs)


class _Server(web.Server):
    def __call__(self) -> web.RequestHandler:
        return _Connection(self, loop=self._loop, **self._kwargs)


class _Connection(web.RequestHandler):
    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if isinstance(exc, ClientConnectionResetError):  # who asked has hung up, before this was cancelled for it
            return web.Response(status=status)
        if not isinstance(exc, BadHttpMessage):
            return super().handle_error(request, status, exc, message)
        log.warning("a request that cannot be read was refused", remote=request.remote, problem=type(exc).__name__)
        response = web.json_response(_anybodys(status, _problem(exc)), status=status, headers=FINAL)
        response.force_close()
        return response


def _problem(exc: BadHttpMessage) -> str:
    """Without what the request said: its headers hold a key."""
    name = type(exc).__name__
    if name == "LineTooLong":
        return f"the request line or a header is longer than {HEADER_BYTES >> 10} KiB"
    return f"this is no HTTP request that can be read: {name}"


def _anybodys(status: int, message: str) -> dict[str, Any]:
    """An error of no API's, since the path is not known: each finds the fields of its own."""
    error = {"type": "invalid_request_error", "message": message, "param": None, "code": status}
    return {"type": "error", "error": error | {"status": "INVALID_ARGUMENT"}}
