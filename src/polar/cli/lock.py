"""A gateway's folder belongs to one live process (another would sweep its sandboxes away); the kernel frees it when
that process is gone, however it went."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.errors import ConfigError

_NAME = "lock"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Makes the folder. Raises ConfigError, naming the holder's pid, when another live process has it."""
    try:
        folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        fd = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigError(f"the folder {folder} cannot be used: {error.strerror}. Give --data another") from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, 20).decode(errors="replace").strip() or "unknown"
            raise ConfigError(
                f"the folder {folder} is in use by another polar process (pid {holder}): "
                "stop that one, or give --data another folder"
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)
