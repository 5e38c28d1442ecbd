"""One command: a session of its own, a bounded record of what it prints, and its life while it prints more.

The record's file gets the first HEAD bytes and at the end the last TAIL; what lies between is read and forgotten.
"""

from __future__ import annotations

import os
import resource
import signal
from contextlib import suppress
from typing import Any

HEAD, TAIL = 4 << 20, 1 << 20
CHUNK = 1 << 16
COMMAND_MARK = "POLAR_COMMAND"
_FIRST_DESCRIPTOR = 3
_NOT_EXECUTABLE = 126


class Tail:
    """The last TAIL bytes of a stream."""

    def __init__(self) -> None:
        self._kept = bytearray()

    def add(self, data: bytes) -> None:
        self._kept += data
        if len(self._kept) > 2 * TAIL:
            del self._kept[:-TAIL]

    def text(self) -> str:
        return bytes(self._kept[-TAIL:]).decode(errors="replace")


class Record:
    """The file `fd` (None: no record). `failure` is the errno of a write that failed, as on a full disk."""

    def __init__(self, fd: int | None) -> None:
        self._fd, self._written, self._lost = fd, 0, 0
        self._tail = Tail()
        self.failure = 0

    def add(self, data: bytes) -> None:
        room = max(0, HEAD - self._written)
        self._write(data[:room])
        self._written += len(data[:room])
        if rest := data[room:]:
            self._lost += len(rest)
            self._tail.add(rest)

    def close(self) -> None:
        tail = self._tail.text().encode()
        if self._lost:
            self._write(b"\n[... %d bytes left out ...]\n" % max(0, self._lost - len(tail)) + tail)
        if self._fd is not None:
            os.close(self._fd)
        self._fd = None

    def _write(self, data: bytes) -> None:
        try:
            while data and self._fd is not None:
                data = data[os.write(self._fd, data) :]
        except OSError as error:
            self.failure = error.errno or 0


class Command:
    """A running command. `streams` are the read ends of its stdout and stderr, until they end."""

    def __init__(self, request: dict[str, Any], log: int | None) -> None:
        self.id: int = request["id"]
        self.record = Record(log)
        self.tails = (Tail(), Tail())
        self.ended = False
        ends = [os.pipe(), os.pipe()]
        self.streams = {reader: tail for (reader, _), tail in zip(ends, self.tails, strict=True)}
        self.pid = os.fork()
        if self.pid == 0:
            _become(request, [writer for _, writer in ends])
        for reader, writer in ends:
            os.close(writer)
            os.set_blocking(reader, False)

    def read(self, fd: int) -> bool:
        """Takes in one chunk; False at the stream's end. What comes after the command's end (of a service that it
        left running) is read, so that the service lives, and forgotten."""
        try:
            data = os.read(fd, CHUNK)
        except BlockingIOError:
            return True
        if data and not self.ended:
            self.streams[fd].add(data)
            self.record.add(data)
        return bool(data)

    def finish(self, status: int) -> dict[str, Any]:
        """Takes in what is left in the pipes, at most a pipe's worth, and says how it ended."""
        for fd in self.streams:
            for _ in range(32):
                if not self.read(fd):
                    break
        self.ended = True
        self.record.close()
        code = os.waitstatus_to_exitcode(status)
        output, errors = (tail.text() for tail in self.tails)
        exit_code = code if code >= 0 else 128 - code
        return {"exit_code": exit_code, "output": output, "errors": errors, "failure": self.record.failure}


def _become(request: dict[str, Any], outputs: list[int]) -> None:
    """In the new process: never returns."""
    try:
        os.setsid()
        stdin = os.open(request["stdin"] or os.devnull, os.O_RDONLY)
        for target, source in enumerate((stdin, *outputs)):
            os.dup2(source, target)
        os.closerange(_FIRST_DESCRIPTOR, 1 << 16)
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        _limit(request["limits"])
        os.umask(0o022)
        os.chdir(request["cwd"])
        environment = request["env"] | {COMMAND_MARK: str(request["id"])}
        os.execve("/bin/sh", ["/bin/sh", "-c", request["command"]], environment)
    except OSError as error:
        os.write(2, f"the command cannot start: {error}\n".encode(errors="replace"))
    finally:
        os._exit(_NOT_EXECUTABLE)


def _limit(limits: dict[str, int]) -> None:
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("500")  # out of memory, the kernel shall take the command, not what serves it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    for name, value in limits.items():
        number = getattr(resource, name)
        hard = resource.getrlimit(number)[1]
        bound = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(number, (bound, bound))
