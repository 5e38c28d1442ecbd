"""Length-prefixed frames with a checksum: a torn tail is cut at the last good frame, and nothing before it is lost.

A file is MAGIC, then frames: uint32 length, uint32 crc32 of the payload (both little-endian), payload.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

MAGIC = b"POLARLG1"
_HEAD = struct.Struct("<II")
MAX_FRAME = 1 << 30


def frame(payload: bytes) -> bytes:
    """Raises ValueError for a payload above MAX_FRAME: a reader would take it for damage."""
    if len(payload) > MAX_FRAME:
        raise ValueError(f"a record of {len(payload)} bytes is larger than a frame may be ({MAX_FRAME})")
    return _HEAD.pack(len(payload), zlib.crc32(payload)) + payload


def payloads(data: bytes) -> Iterator[tuple[memoryview, int]]:
    """Each good payload with the offset behind its frame; stops silently at the first torn or damaged one."""
    if data[: len(MAGIC)] != MAGIC:
        return
    view = memoryview(data)
    at = len(MAGIC)
    while at + _HEAD.size <= len(data):
        length, checksum = _HEAD.unpack_from(data, at)
        start, end = at + _HEAD.size, at + _HEAD.size + length
        if length > MAX_FRAME or end > len(data):
            return
        payload = view[start:end]
        if zlib.crc32(payload) != checksum:
            return
        yield payload, end
        at = end
