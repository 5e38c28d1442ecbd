"""One command: a session of its own, a bounded record of what it prints, and its life while it prints more.

The record's file gets the first HEAD bytes and at the end the last TAIL; what lies between is read and forgotten.
"""

from __future__ import annotations

import os
import resource
import stat
import subprocess
from contextlib import suppress
from typing import Any

HEAD, TAIL = 4 << 20, 1 << 20
CHUNK = 1 << 16
_PIPE = 1 << 20
_CANNOT_START = 126
COMMAND_MARK = "POLAR_COMMAND"
IMPOSSIBLE = (ValueError, OverflowError, RecursionError)
"""what a path, text or number ends in that the system does not take"""


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
        try:
            self.pid = _spawn(request, ends[0][1], ends[1][1])
        except (OSError, *IMPOSSIBLE):
            self.record.close()
            for reader, _ in ends:
                os.close(reader)
            raise
        finally:
            for _, writer in ends:
                os.close(writer)
        for reader, _ in ends:
            os.set_blocking(reader, False)
        self.streams = {reader: tail for (reader, _), tail in zip(ends, self.tails, strict=True)}

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

    def _drain(self, fd: int) -> None:
        for _ in range(_PIPE // CHUNK):
            try:
                data = os.read(fd, CHUNK)
            except BlockingIOError:
                return
            self.streams[fd].add(data)
            self.record.add(data)

    def finish(self, status: int) -> dict[str, Any]:
        """Takes in what is left in the pipes, at most a pipe's worth, and says how it ended."""
        for fd in self.streams:
            self._drain(fd)
        self.ended = True
        self.record.close()
        code = os.waitstatus_to_exitcode(status)
        output, errors = (tail.text() for tail in self.tails)
        exit_code = code if code >= 0 else 128 - code
        return {"exit_code": exit_code, "output": output, "errors": errors, "failure": self.record.failure}


def refused(request: dict[str, Any], error: Exception) -> dict[str, Any]:
    """How a command ended that could not start."""
    text = f"the command cannot start: {error}"
    return {"id": request["id"], "exit_code": _CANNOT_START, "output": "", "errors": text, "failure": 0}


def _spawn(request: dict[str, Any], output: int, errors: int) -> int:
    """The pid of /bin/sh. Raises OSError, also when stdin is no regular file, and what is IMPOSSIBLE."""
    stdin = open_regular(request["stdin"], os.O_RDONLY) if request["stdin"] else os.open(os.devnull, os.O_RDONLY)
    before: dict[int, tuple[int, int]] = {}
    try:
        before = _lower(request["limits"])
        process = subprocess.Popen(
            ["/bin/sh", "-c", request["command"]],
            stdin=stdin,
            stdout=output,
            stderr=errors,
            cwd=request["cwd"],
            env=request["env"] | {COMMAND_MARK: str(request["id"])},
            start_new_session=True,
            umask=0o022,
        )
    finally:
        os.close(stdin)
        for number, limits in before.items():
            resource.setrlimit(number, limits)
    process.returncode = 0  # reaped by the server, with every orphan
    _bind(process.pid, request["limits"])
    return process.pid


def _lower(limits: dict[str, int]) -> dict[int, tuple[int, int]]:
    """Lowers our own soft limits, which a process that starts now inherits; returns what they were."""
    before = {getattr(resource, name): resource.getrlimit(getattr(resource, name)) for name in limits}
    for name, value in limits.items():
        number = getattr(resource, name)
        resource.setrlimit(number, (_within(value, before[number][1]), before[number][1]))
    return before


def _bind(pid: int, limits: dict[str, int]) -> None:
    """Makes the limits final, and the command the one that the kernel takes when memory is out."""
    with suppress(OSError):
        for name, value in limits.items():
            number = getattr(resource, name)
            bound = _within(value, resource.prlimit(pid, number)[1])
            resource.prlimit(pid, number, (bound, bound))
        with open(f"/proc/{pid}/oom_score_adj", "w") as file:
            file.write("500")


def _within(value: int, hard: int) -> int:
    return value if hard == resource.RLIM_INFINITY else min(value, hard)


def open_regular(path: str, flags: int, mode: int = 0o644) -> int:
    """Opens a regular file without ever waiting; anything else is FileNotFoundError."""
    fd = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY, mode)
    if stat.S_ISREG(os.fstat(fd).st_mode):
        os.set_blocking(fd, True)
        return fd
    os.close(fd)
    raise FileNotFoundError(2, f"{path} is not a regular file")
