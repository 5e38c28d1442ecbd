"""Append-only writing of a session log: when `append` returns, a kill −9 of this process cannot lose the record.

A record stands in the file whole or not at all: what a failed write left behind is cut off again, so that later
records are not lost behind it. A record about a call stands behind that call's opened record.
"""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path
from typing import Any

from polar.codec import to_msgpack
from polar.errors import ServerFault
from polar.sessionlog.frames import MAGIC, frame
from polar.sessionlog.records import Chunk, Header, Opened, Record, Sealed

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def write_fault(path: Path, error: OSError) -> ServerFault:
    name = "disk_full" if error.errno in _NO_ROOM else "log_write"
    return ServerFault(f"cannot write the session log {path}: {error.strerror}", name=name)


class LogWriter:
    """One open log file; `path` must not exist. Appending to a sealed log is an error. Not safe for several threads.

    Raises ServerFault `disk_full` or `log_write`, as every method that writes does.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.calls = 0
        self.sampled = 0
        self._end = 0
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._fd: int | None = os.open(path, flags, 0o600)
        except OSError as error:
            raise write_fault(path, error) from error
        try:
            self._write(MAGIC + frame(to_msgpack(header)))
        except ServerFault:
            self.close()
            path.unlink(missing_ok=True)
            raise

    @property
    def sealed(self) -> bool:
        return self._fd is None

    def append(self, *records: Record) -> None:
        """In one write. Calls are numbered 1, 2, 3, … in the order of their opened records; ServerFault
        `log_order` otherwise."""
        calls = self.calls
        for record in records:
            opening = isinstance(record, Opened)
            number = getattr(record, "call", None)
            if number is not None and not (number == calls + 1 if opening else 1 <= number <= calls):
                kind = type(record).__name__.lower()
                raise ServerFault(f"{kind} record of call {number}, but {calls} calls are open", name="log_order")
            calls += opening
        self._write(b"".join([frame(to_msgpack(record)) for record in records]))
        self.calls = calls
        self.sampled += sum(len(record.ids) for record in records if isinstance(record, Chunk))

    def seal(self) -> None:
        """Writes the last record, brings the file to disk (fsync) and closes it. A second call does nothing."""
        if self._fd is None:
            return
        self.append(Sealed(at=time.time(), calls=self.calls, sampled=self.sampled))
        try:
            os.fsync(self._fd)
        except OSError as error:
            raise write_fault(self.path, error) from error
        self.close()

    def close(self) -> None:
        """Closes without sealing, as a crash would."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def __enter__(self) -> LogWriter:
        return self

    def __exit__(self, *exception: Any) -> None:
        self.close()

    def _write(self, data: bytes) -> None:
        if self._fd is None:
            raise ServerFault(f"the session log {self.path.name} is closed", name="log_sealed")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            self._cut_back(self._fd)
            raise write_fault(self.path, error) from error
        self._end += len(data)

    def _cut_back(self, fd: int) -> None:
        try:
            os.ftruncate(fd, self._end)
        except OSError:
            # Behind a torn frame nothing can be read: better to take no further record than to lose them silently.
            self.close()
