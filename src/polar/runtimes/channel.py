"""Requests to a sandbox's server and their answers, over one Unix socket; any number may be under way.

When the server is gone, every request under way and every later one raises SandboxFault `sandbox_lost`.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
from contextlib import suppress
from typing import Any

from polar.errors import SandboxFault
from polar.runtimes.inside.framing import CHUNK, MOST_FDS, Inbox, Message, pack

Answer = tuple[Message, list[int]]


class Channel:
    def __init__(self, control: socket.socket) -> None:
        self._socket = control
        self._socket.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._inbox = Inbox()
        self._ids = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Answer]] = {}
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._sending = asyncio.Lock()
        self._open, self._serving = True, False
        self.pid = 0
        """of the server, on the host; 0 until it is born"""
        self._pidfd = -1
        self._over = asyncio.Event()
        self._loop.add_reader(self._socket, self._receive)

    async def ready(self) -> None:
        """Waits until the sandbox stands. Raises SandboxFault `sandbox_start`."""
        await self._ready

    async def ask(self, op: str, *fds: int, **fields: Any) -> Answer:
        """Raises OSError when the request failed in the sandbox."""
        return await (await self.send(op, *fds, **fields))[1]

    async def send(self, op: str, *fds: int, **fields: Any) -> tuple[int, asyncio.Future[Answer]]:
        """The request's id and the future of its answer (an OSError when it failed in the sandbox)."""
        request_id = next(self._ids)
        async with self._sending:
            if not self._open:
                raise _lost()
            answer = self._waiting[request_id] = self._loop.create_future()
            try:
                await post(self._socket, {"op": op, "id": request_id, **fields}, fds)
            except OSError as error:
                raise _lost() from error
        return request_id, answer

    def close(self) -> None:
        """The server ends, and with it all that it started; `ended` waits for that."""
        if not self._open:
            return
        self._open = False
        self._over.set()
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._socket.close()
        for future in self._waiting.values():
            _fail(future, _lost())
        _fail(self._ready, _lost())
        self._waiting.clear()

    async def ended(self, *, kill: bool) -> None:
        """Closes, and waits until the server has ended, and whoever made it; `kill` where its death takes all that it
        started along."""
        with suppress(OSError):  # it may have ended already
            if self._open:
                self._socket.shutdown(socket.SHUT_WR)
            if kill and self._pidfd >= 0:
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        try:
            await self._over.wait()
            if self._pidfd >= 0:
                await self._reaped(self._pidfd)
        finally:
            self.close()
            if self._pidfd >= 0:
                os.close(self._pidfd)
            self._pidfd = -1

    async def _reaped(self, pidfd: int) -> None:
        dead = asyncio.Event()
        self._loop.add_reader(pidfd, dead.set)
        try:
            await dead.wait()
        finally:
            self._loop.remove_reader(pidfd)

    def _receive(self) -> None:
        try:
            data, fds, _, _ = socket.recv_fds(self._socket, CHUNK, MOST_FDS)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data, fds = b"", []
        if not data:
            self.close()
            return
        for message, attached in self._inbox.feed(data, fds):
            self._dispatch(message, attached)

    def _dispatch(self, message: Message, fds: list[int]) -> None:
        match message.get("event"):
            case "born":
                self.pid, self._pidfd = message["pid"], fds[0]
                self._greet()
            case "ready":
                self._serving = True
                self._greet()
            case "failed":
                _fail(self._ready, SandboxFault(message["error"], name="sandbox_start"))
            case _:
                self._deliver(message, fds)

    def _greet(self) -> None:
        """Two processes greet, in either order: the one that knows the server's pid on the host, and the server."""
        if self.pid and self._serving and not self._ready.done():
            self._ready.set_result(None)

    def _deliver(self, message: Message, fds: list[int]) -> None:
        future = self._waiting.pop(message["id"])
        if future.done():  # whoever asked has been cancelled
            for fd in fds:
                os.close(fd)
        elif "errno" in message:
            _fail(future, OSError(message["errno"], message["error"]))
        else:
            future.set_result((message, fds))


async def post(sock: socket.socket, message: Message, fds: tuple[int, ...]) -> None:
    """Sends one whole message on a socket that does not block; callers take turns. Raises OSError."""
    loop = asyncio.get_running_loop()
    data = pack(message | {"fds": len(fds)})
    sent = 0
    while fds and not sent:
        try:
            sent = socket.send_fds(sock, [data], list(fds))
        except BlockingIOError:
            await _writable(loop, sock)
    await loop.sock_sendall(sock, data[sent:])


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    room = asyncio.Event()
    loop.add_writer(sock, room.set)
    try:
        await room.wait()
    finally:
        loop.remove_writer(sock)


def _lost() -> SandboxFault:
    return SandboxFault("the sandbox is gone: the process that served it ended")


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
        future.exception()  # nobody may be waiting for it
