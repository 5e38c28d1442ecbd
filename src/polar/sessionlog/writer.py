"""Append-only writing of a session log: when `append` returns, a kill −9 of this process cannot lose the record."""

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


class LogWriter:
    """One open log file. Appending to a sealed log is an error. Not safe for several threads."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.calls = 0
        self.sampled = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._write(MAGIC + frame(to_msgpack(header)))

    @property
    def sealed(self) -> bool:
        return self._fd is None

    def append(self, record: Record) -> None:
        """Raises ServerFault `disk_full` or `log_write` when the file did not take the whole record."""
        if isinstance(record, Opened):
            self.calls += 1
        elif isinstance(record, Chunk):
            self.sampled += len(record.ids)
        self._write(frame(to_msgpack(record)))

    def seal(self) -> None:
        """Writes the last record, brings the file to disk (fsync) and closes it. A second call does nothing."""
        if self._fd is None:
            return
        self.append(Sealed(at=time.time(), calls=self.calls, sampled=self.sampled))
        os.fsync(self._fd)
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
            raise ServerFault(f"the session log {self.path.name} is sealed", name="log_sealed")
        view = memoryview(data)
        try:
            while view:
                view = view[os.write(self._fd, view) :]
        except OSError as error:
            name = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "log_write"
            raise ServerFault(f"cannot write the session log {self.path}: {error.strerror}", name=name) from error
