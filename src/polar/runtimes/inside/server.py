"""Serves one sandbox over its control socket until the owner or the launcher is gone; then all started here dies.

Requests: run, kill, kill_all, listen, open, mkdir, symlink. Each is answered once, under its id.
"""

from __future__ import annotations

import errno
import os
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from polar.runtimes.inside.command import COMMAND_MARK, IMPOSSIBLE, Command, open_regular, refused
from polar.runtimes.inside.framing import CHUNK, MOST_FDS, Inbox, Message, pack
from polar.runtimes.inside.processes import descendants, kill_until_gone, marked, session_members

BACKLOG = 128


class Server:
    """`life` ends when the launcher does. `kill_all` kills and reaps everything that was ever started here."""

    def __init__(self, control: socket.socket, life: int, kill_all: Callable[[], None]) -> None:
        self.control, self._life, self._kill_all = control, life, kill_all
        self._inbox = Inbox()
        self._selector = selectors.DefaultSelector()
        self._commands: dict[int, Command] = {}
        self._wake, waker = os.pipe()
        for fd in (self._wake, waker):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(waker, warn_on_full_buffer=False)

    def serve(self) -> None:
        """Returns when nobody wants the sandbox any more, with nothing left running."""
        self._selector.register(self.control, selectors.EVENT_READ, self._receive)
        self._selector.register(self._life, selectors.EVENT_READ, self._orphaned)
        self._selector.register(self._wake, selectors.EVENT_READ, self._reap)
        with suppress(BrokenPipeError, ConnectionResetError, EOFError):
            self.send({"event": "ready"})
            while True:
                for key, _ in self._selector.select():
                    key.data()
        self._kill_all()

    def _orphaned(self) -> None:
        raise EOFError

    def send(self, message: Message, fds: tuple[int, ...] = ()) -> None:
        data = pack(message | {"fds": len(fds)})
        sent = socket.send_fds(self.control, [data], list(fds)) if fds else 0
        self.control.sendall(data[sent:])

    def _receive(self) -> None:
        data, fds, _, _ = socket.recv_fds(self.control, CHUNK, MOST_FDS)
        if not data:
            raise EOFError
        for request, attached in self._inbox.feed(data, fds):
            try:
                getattr(self, f"_on_{request['op']}")(request, attached)
            except OSError as error:
                problem = f"{error.strerror}: {error.filename}"
                self.send({"id": request["id"], "errno": error.errno or 0, "error": problem})
            except IMPOSSIBLE as error:
                self.send({"id": request["id"], "errno": errno.EINVAL, "error": f"{type(error).__name__}: {error}"})

    def _answer(self, request: Message, fds: tuple[int, ...] = (), **fields: Any) -> None:
        self.send({"id": request["id"], **fields}, fds)
        for fd in fds:
            os.close(fd)

    def _on_run(self, request: Message, fds: list[int]) -> None:
        try:
            command = Command(request, fds[0] if fds else None)
        except (OSError, *IMPOSSIBLE) as error:
            self.send(refused(request, error))
            return
        self._commands[command.pid] = command
        for fd in command.streams:
            self._selector.register(fd, selectors.EVENT_READ, lambda fd=fd: self._read(command, fd))

    def _read(self, command: Command, fd: int) -> None:
        if not command.read(fd):
            self._selector.unregister(fd)
            del command.streams[fd]
            os.close(fd)

    def _reap(self) -> None:
        with suppress(BlockingIOError):
            os.read(self._wake, CHUNK)
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                self._ended(*ended)

    def _ended(self, pid: int, status: int) -> None:
        command = self._commands.pop(pid, None)
        if command is not None:
            self.send({"id": command.id} | command.finish(status))

    def _on_kill(self, request: Message, _: list[int]) -> None:
        """Kills a command with all that it started, daemons included; the command's own answer follows."""
        mark = f"{COMMAND_MARK}={request['command']}".encode()
        root = next((pid for pid, command in self._commands.items() if command.id == request["command"]), 0)

        def members() -> set[int]:
            tree = {root} | descendants(root) | session_members(root) if root in self._commands else set()
            return tree | marked(mark, descendants(os.getpid()))

        if not kill_until_gone(members, self._reap):
            self._end_everything()
        self._answer(request)

    def _on_kill_all(self, request: Message, _: list[int]) -> None:
        self._end_everything()
        self._answer(request)

    def _end_everything(self) -> None:
        self._kill_all()
        for pid in list(self._commands):
            self._ended(pid, signal.SIGKILL)

    def _on_listen(self, request: Message, _: list[int]) -> None:
        listener = socket.socket()
        listener.bind(("127.0.0.1", 0))
        listener.listen(BACKLOG)
        port = listener.getsockname()[1]
        self._answer(request, (listener.detach(),), port=port)

    def _on_open(self, request: Message, _: list[int]) -> None:
        """Opens a regular file here, where every link leads to something inside, and hands the descriptor over."""
        path, writing = request["path"], request["write"]
        if writing:
            os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        fd = open_regular(path, os.O_WRONLY | os.O_CREAT if writing else os.O_RDONLY, request["mode"])
        if writing:
            os.ftruncate(fd, 0)
            os.fchmod(fd, request["mode"])
        self._answer(request, (fd,))

    def _on_mkdir(self, request: Message, _: list[int]) -> None:
        os.makedirs(request["path"], exist_ok=True)
        self._answer(request)

    def _on_symlink(self, request: Message, _: list[int]) -> None:
        with suppress(FileNotFoundError):
            os.unlink(request["path"])
        os.symlink(request["to"], request["path"])
        self._answer(request)
