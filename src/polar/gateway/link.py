"""The gateway's side of the node API. Every call may be repeated: the server knows attempts by id."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import aiohttp
import msgspec

from polar.codec import from_msgpack, to_msgpack
from polar.config import TOKEN_HEADER
from polar.errors import ServerFault
from polar.nodeapi import (
    WORK_WAIT_SECONDS,
    NodeResult,
    PollReply,
    PollRequest,
    ResultReply,
    Uploaded,
    WorkReply,
    WorkRequest,
)

T = TypeVar("T")
_MSGPACK = {"Content-Type": "application/msgpack", "Accept": "application/msgpack"}
PART_BYTES = 4 << 20
"""of a log that is uploaded in one request"""
_KEEP_ALIVE_SECONDS = 3.0
"""Shorter than any server's: a connection that the server closes while a request is on its way loses the request."""


class Refused(ServerFault):
    """The server answered, and said no; `status` is its HTTP status. Asking again gives the same answer."""

    default_name = "server_refused"

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServerLink:
    """Raises ServerFault `server_unreachable` when there is no answer, Refused when it is a 4xx."""

    def __init__(self, url: str, token: str) -> None:
        self.url = url.rstrip("/")
        self._headers = {TOKEN_HEADER: token}
        self._http: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> ServerLink:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        self._http = aiohttp.ClientSession(headers=self._headers, connector=connector)
        return self

    async def __aexit__(self, *exception: object) -> None:
        if self._http is not None:
            await self._http.close()

    async def poll(self, request: PollRequest) -> PollReply:
        return await self._post("/node/poll", request, PollReply, seconds=10.0)

    async def work(self, request: WorkRequest) -> WorkReply:
        return await self._post("/node/work", request, WorkReply, seconds=WORK_WAIT_SECONDS + 10.0)

    async def result(self, result: NodeResult) -> ResultReply:
        path = f"/node/sessions/{result.session_id}/{result.attempt}/result"
        return await self._post(path, result, ResultReply, seconds=60.0)

    async def upload(self, session_id: str, attempt: int, packed: Path) -> None:
        """Sends a packed log part by part, going on from where the server says it stands."""
        path = f"/node/sessions/{session_id}/{attempt}/log"
        size = packed.stat().st_size
        stands = 0 if size <= PART_BYTES else await self._put(path, 0, b"")
        while stands < size:
            stands = await self._put(path, stands, await asyncio.to_thread(_part, packed, stands))

    async def _put(self, path: str, offset: int, part: bytes) -> int:
        """How many bytes the server has after it."""
        return (await self._send("PUT", f"{path}?offset={offset}", part, Uploaded, seconds=60.0)).size

    async def _post(self, path: str, record: object, reply: type[T], seconds: float) -> T:
        return await self._send("POST", path, to_msgpack(record), reply, seconds)

    async def _send(self, method: str, path: str, body: bytes, reply: type[T], seconds: float) -> T:
        assert self._http is not None, "use `async with`"
        timeout = aiohttp.ClientTimeout(total=seconds)
        try:
            async with self._http.request(
                method, self.url + path, data=body, headers=_MSGPACK, timeout=timeout
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            problem = f"the rollout server {self.url} does not answer: {error or 'time-out'}"
            raise ServerFault(problem, name="server_unreachable") from error
        if answer.status >= 500:
            raise ServerFault(f"the rollout server: {answer.status} {_detail(content)}", name="server_error")
        if answer.status >= 400:
            raise Refused(f"the rollout server: {answer.status} {_detail(content)}", answer.status)
        return from_msgpack(content, reply)


def _part(path: Path, offset: int) -> bytes:
    with path.open("rb") as file:
        file.seek(offset)
        return file.read(PART_BYTES)


def _detail(content: bytes) -> str:
    """The server's own words."""
    with suppress(msgspec.DecodeError):
        return msgspec.json.decode(content, type=_Error).detail
    return content[:300].decode(errors="replace")


class _Error(msgspec.Struct):
    detail: str
