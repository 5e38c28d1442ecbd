"""Request bodies in a log: each is stored as what it has that an earlier one had not, and read back byte for byte.

A harness sends its whole conversation with every turn, so that bodies stored whole would make a log quadratic. Of the
newest ones only digests of blocks are kept, counted from the start and from the end: clients write what never changes
(tools) behind the messages as well as before them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard

from polar.sessionlog.records import Opened

BLOCK = 4096
_REMEMBERED = 8


class Body:
    """A request's bytes; `heads` is a digest of each block from the start, `digest` one of all."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self.heads = _digests(raw, range(0, len(raw) - BLOCK + 1, BLOCK))
        self.digest = hash((self.heads.tobytes(), raw[len(self.heads) * BLOCK :]))


class _Marks(msgspec.Struct, frozen=True):
    length: int
    heads: np.ndarray
    tails: np.ndarray


class StoredBody(msgspec.Struct, frozen=True, kw_only=True):
    """`fields` of an opened record that hold the body."""

    fields: dict[str, Any]
    marks: _Marks


class Bodies:
    """The newest bodies of a log that is being written."""

    def __init__(self) -> None:
        self._marks: dict[int, _Marks] = {}

    def stored(self, body: Body, like: int | None) -> StoredBody:
        """`like`: the call whose body it probably goes on from; else the newest one is taken. May run in a thread."""
        base = like if like in self._marks else next(reversed(self._marks), None)
        known = self._marks[base] if base is not None else _Marks(0, body.heads[:0], body.heads[:0])
        keep = _same(known.heads, body.heads) * BLOCK
        # Blocks from the end: of what is new alone, since that is as far as the next body's can be expected to go.
        length = len(body.raw)
        tails = _digests(body.raw, range(length - BLOCK, keep - 1, -BLOCK))
        room = (min(length, known.length) - keep) // BLOCK
        tail = min(_same(known.tails, tails), room) * BLOCK
        data = zstandard.ZstdCompressor(level=1).compress(body.raw[keep : length - tail])
        shared = {"body_base": base, "body_keep": keep, "body_tail": tail} if keep or tail else {}
        return StoredBody(fields={"body": data} | shared, marks=_Marks(length, body.heads, tails))

    def remember(self, number: int, stored: StoredBody) -> None:
        """Now it is the body of this call."""
        self._marks[number] = stored.marks
        if len(self._marks) > _REMEMBERED:
            del self._marks[next(iter(self._marks))]


def restore(chain: Sequence[Opened]) -> bytes:
    """The body of the first call of `chain`, in which each is followed by the one that its body stands on."""
    raw = b""
    for opened in reversed(chain):
        middle = zstandard.ZstdDecompressor().decompress(opened.body)
        raw = raw[: opened.body_keep] + middle + raw[len(raw) - opened.body_tail :]
    return raw


def _digests(raw: bytes, starts: range) -> np.ndarray:
    """64 bits a block, of this process alone: what is compared are some thousand blocks of one session."""
    return np.fromiter([hash(raw[at : at + BLOCK]) for at in starts], np.int64, len(starts))


def _same(a: np.ndarray, b: np.ndarray) -> int:
    """How many of the first items are equal."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
