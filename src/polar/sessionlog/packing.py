"""A sealed log is packed with zstd before it leaves the gateway; its name everywhere is its packed bytes' sha256."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import zstandard

from polar.sessionlog.writer import write_fault

_LEVEL = 9


def pack(path: Path) -> tuple[Path, str]:
    """Writes `path` + `.zst` beside it (whole or not at all) and returns it with the sha256 of its bytes; a log of any
    size in little memory.

    Raises ServerFault `disk_full` or `log_write`.
    """
    target = path.with_name(path.name + ".zst")
    partial = target.with_name(target.name + ".part")
    try:
        with path.open("rb") as plain, partial.open("w+b") as file:
            compressor = zstandard.ZstdCompressor(level=_LEVEL, write_checksum=True)
            compressor.copy_stream(plain, file, size=path.stat().st_size)
            file.flush()
            os.fsync(file.fileno())
            file.seek(0)
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        partial.rename(target)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise write_fault(target, error) from error
    return target, digest


def unpack(data: bytes) -> bytes:
    """Raises zstandard.ZstdError on damaged or truncated bytes."""
    return zstandard.ZstdDecompressor().decompress(data)
