"""A session log read back: calls in the order they were opened, each with its ids, logprobs, spans and fate.

Reading never fails on a torn tail: what is behind the last good frame does not exist.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polar.codec import from_msgpack
from polar.errors import ServerFault
from polar.records import IDS, LOGPROBS, VersionSpan
from polar.sessionlog.frames import payloads
from polar.sessionlog.packing import unpack
from polar.sessionlog.records import (
    SCHEMA_VERSION,
    Chunk,
    Delivered,
    Finished,
    Header,
    Joined,
    Opened,
    Prompt,
    Record,
    Refused,
    Sealed,
)


class Call(msgspec.Struct, kw_only=True):
    """One completion as the log knows it. `ids` [n] sampled, `logprobs` [n] or None where the engine gave none."""

    opened: Opened
    prompt: Prompt | None = None
    ids: np.ndarray
    logprobs: np.ndarray | None
    spans: list[VersionSpan]
    finished: Finished | None = None
    delivered: bool = False
    joined: int = 0

    @property
    def number(self) -> int:
        return self.opened.call

    @property
    def prompt_length(self) -> int:
        return self.prompt.keep + len(self.prompt.ids) if self.prompt else 0

    @property
    def length(self) -> int:
        """Prompt and sampled ids."""
        return self.prompt_length + len(self.ids)


class SessionLog(msgspec.Struct, kw_only=True):
    header: Header
    calls: list[Call]
    refusals: list[Refused]
    sealed: Sealed | None
    torn: bool

    def call(self, number: int) -> Call:
        """Raises KeyError for a number that was never opened."""
        index = number - 1
        if 0 <= index < len(self.calls) and self.calls[index].number == number:
            return self.calls[index]
        raise KeyError(number)

    def prompt_ids(self, call: Call) -> np.ndarray:
        """The call's whole prompt [prompt_length], put together from the calls it stands on; linear in its length."""
        return self._head(call, call.prompt_length)

    def messages(self, call: Call) -> list[dict[str, Any]]:
        """The canonical messages of the call's prompt."""
        opened, parts = call.opened, [call.opened.messages]
        keep = opened.messages_keep
        while opened.messages_base is not None:
            base = self.call(opened.messages_base)
            answer = [base.finished.message] if base.finished and base.finished.message else []
            inherited = base.opened.messages_keep
            parts.append((base.opened.messages + answer)[: max(0, keep - inherited)])
            keep = min(keep, inherited)
            opened = base.opened
        return [message for part in reversed(parts) for message in part]

    def tools(self, call: Call) -> list[dict[str, Any]] | None:
        source = call.opened.tools_from
        return self.call(source).opened.tools if source is not None else call.opened.tools

    def _head(self, call: Call, length: int) -> np.ndarray:
        parts: list[np.ndarray] = []
        at: Call | None = call
        while at is not None and length > 0:
            prompt = at.prompt
            keep = prompt.keep if prompt else 0
            if length > keep:
                own = np.concatenate([prompt.ids, at.ids]) if prompt else at.ids
                parts.append(own[: length - keep])
            length = min(length, keep)
            at = self.call(prompt.base) if prompt and prompt.base is not None else None
        return np.concatenate(parts[::-1]).astype(IDS, copy=False) if parts else np.empty(0, IDS)


def read(path: Path) -> SessionLog:
    """Reads a log file, packed (`.zst`) or plain. Raises ServerFault `log_unreadable` when not even a header stands."""
    data = path.read_bytes()
    return parse(unpack(data) if path.suffix == ".zst" else data, path.name)


def parse(data: bytes, name: str = "session log") -> SessionLog:
    records: list[Record] = []
    good = 0
    for payload, end in payloads(data):
        records.append(from_msgpack(payload, Record))  # type: ignore[arg-type]
        good = end
    if not records or not isinstance(records[0], Header):
        raise ServerFault(f"{name} has no readable header: it is not a session log", name="log_unreadable")
    header = records[0]
    if header.schema_version != SCHEMA_VERSION:
        raise ServerFault(f"{name} has schema {header.schema_version}, not {SCHEMA_VERSION}", name="log_unreadable")
    return _assemble(header, records[1:], torn=good != len(data))


class _Gathered:
    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.chunks: list[Chunk] = []
        self.prompt: Prompt | None = None
        self.finished: Finished | None = None
        self.delivered = False
        self.joined = 0

    def call(self) -> Call:
        ids, logprobs, spans = _joined_chunks(self.chunks)
        return Call(
            opened=self.opened,
            prompt=self.prompt,
            ids=ids,
            logprobs=logprobs,
            spans=spans,
            finished=self.finished,
            delivered=self.delivered,
            joined=self.joined,
        )


def _assemble(header: Header, records: list[Record], torn: bool) -> SessionLog:
    gathered: dict[int, _Gathered] = {}
    refusals: list[Refused] = []
    sealed: Sealed | None = None
    for record in records:
        match record:
            case Opened():
                gathered[record.call] = _Gathered(record)
            case Prompt():
                gathered[record.call].prompt = record
            case Chunk():
                gathered[record.call].chunks.append(record)
            case Finished():
                gathered[record.call].finished = record
            case Delivered():
                gathered[record.call].delivered = True
            case Joined():
                gathered[record.call].joined += 1
            case Refused():
                refusals.append(record)
            case Sealed():
                sealed = record
    calls = [item.call() for item in gathered.values()]
    return SessionLog(header=header, calls=calls, refusals=refusals, sealed=sealed, torn=torn)


def _joined_chunks(chunks: list[Chunk]) -> tuple[np.ndarray, np.ndarray | None, list[VersionSpan]]:
    """Chunks in order as one; logprobs None when any chunk has none or not one an id."""
    ids = np.concatenate([chunk.ids for chunk in chunks]).astype(IDS, copy=False) if chunks else np.empty(0, IDS)
    spans: list[VersionSpan] = []
    at = 0
    for chunk in chunks:
        end = at + len(chunk.ids)
        if chunk.version is not None and end > at:
            if spans and spans[-1][1] == at and spans[-1][2] == chunk.version:
                spans[-1] = (spans[-1][0], end, chunk.version)
            else:
                spans.append((at, end, chunk.version))
        at = end
    pieces = [part.logprobs for part in chunks if part.logprobs is not None and len(part.logprobs) == len(part.ids)]
    aligned = len(pieces) == len(chunks)
    logprobs = np.concatenate([np.empty(0, LOGPROBS), *pieces]).astype(LOGPROBS, copy=False) if aligned else None
    return ids, logprobs, spans
