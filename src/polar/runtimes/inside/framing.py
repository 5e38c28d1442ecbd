"""Messages on a Unix stream socket: four bytes of length, JSON, and descriptors that come with them or before.

A message that carries descriptors says how many in its key `fds`; they are handed out in the order they came.
"""

from __future__ import annotations

import json
import struct
from typing import Any

Message = dict[str, Any]
CHUNK = 1 << 16
MOST_FDS = 8
_LENGTH = struct.Struct("!I")


def pack(message: Message) -> bytes:
    body = json.dumps(message).encode()
    return _LENGTH.pack(len(body)) + body


class Inbox:
    """Turns what arrives into whole messages, each with its descriptors."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._fds: list[int] = []

    def feed(self, data: bytes, fds: list[int]) -> list[tuple[Message, list[int]]]:
        self._bytes += data
        self._fds += fds
        messages = []
        while (message := self._next()) is not None:
            count = message.pop("fds", 0)
            messages.append((message, self._fds[:count]))
            del self._fds[:count]
        return messages

    def _next(self) -> Message | None:
        if len(self._bytes) < _LENGTH.size:
            return None
        end = _LENGTH.size + _LENGTH.unpack_from(self._bytes)[0]
        if len(self._bytes) < end:
            return None
        message = json.loads(bytes(self._bytes[_LENGTH.size : end]))
        del self._bytes[:end]
        return message
