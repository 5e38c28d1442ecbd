"""Request bodies in a log: each is stored as what it has that an earlier one had not, and read back byte for byte.

A harness sends its whole conversation with every turn, so that bodies stored whole would make a log quadratic. Of the
newest ones only digests of blocks are kept, counted from the start and from the end: clients write what never changes
(tools) behind the messages as well as before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import zstandard

from polar.sessionlog.records import Opened

BLOCK = 4096
_REMEMBERED = 8


class Body:
    """A request's bytes; `digest` names them."""

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        view, end = memoryview(raw), len(raw)
        starts = range(0, end - BLOCK + 1, BLOCK)
        self.heads = _digests([view[at : at + BLOCK] for at in starts])
        self.tails = _digests([view[end - at - BLOCK : end - at] for at in starts])
        rest = raw[len(starts) * BLOCK :]
        self.digest = hashlib.sha256(self.heads.tobytes() + rest).digest()


class _Marks(msgspec.Struct, frozen=True):
    length: int
    heads: np.ndarray
    tails: np.ndarray


class Bodies:
    """The newest bodies of a log that is being written."""

    def __init__(self) -> None:
        self._marks: dict[int, _Marks] = {}

    def stored(self, number: int, body: Body, like: int | None) -> dict[str, Any]:
        """The fields of the opened record of call `number` that hold its body. `like`: the call whose body it probably
        goes on from; else the newest one is taken."""
        base = like if like in self._marks else next(reversed(self._marks), None)
        keep, tail = self._shared(base, body)
        self._marks[number] = _Marks(len(body.raw), body.heads, body.tails)
        if len(self._marks) > _REMEMBERED:
            del self._marks[next(iter(self._marks))]
        data = zstandard.ZstdCompressor(level=1).compress(body.raw[keep : len(body.raw) - tail])
        shared = {"body_base": base, "body_keep": keep, "body_tail": tail} if keep or tail else {}
        return {"body": data} | shared

    def _shared(self, base: int | None, body: Body) -> tuple[int, int]:
        """How many bytes at the start and at the end are those of `base`; they overlap in neither body."""
        if base is None:
            return 0, 0
        known = self._marks[base]
        keep = _same(known.heads, body.heads)
        room = (min(len(body.raw), known.length) - keep * BLOCK) // BLOCK
        return keep * BLOCK, min(_same(known.tails, body.tails), room) * BLOCK


def restore(chain: Sequence[Opened]) -> bytes:
    """The body of the first call of `chain`, in which each is followed by the one that its body stands on."""
    raw = b""
    for opened in reversed(chain):
        middle = zstandard.ZstdDecompressor().decompress(opened.body)
        raw = raw[: opened.body_keep] + middle + raw[len(raw) - opened.body_tail :]
    return raw


def _digests(blocks: list[memoryview]) -> np.ndarray:
    """Eight bytes a block: what is compared are a few thousand of one session, not what an adversary could choose."""
    return np.frombuffer(b"".join(hashlib.sha256(block).digest()[:8] for block in blocks), np.uint64)


def _same(a: np.ndarray, b: np.ndarray) -> int:
    """How many of the first items are equal."""
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
