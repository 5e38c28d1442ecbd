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
from polar.sessionlog.bodies import restore
from polar.sessionlog.frames import payloads
from polar.sessionlog.packing import unpack
from polar.sessionlog.records import (
    READABLE,
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
        if 1 <= number <= len(self.calls):
            return self.calls[number - 1]
        raise KeyError(number)

    def prompt_ids(self, call: Call) -> np.ndarray:
        """The call's whole prompt [prompt_length], put together from the calls it stands on; linear in its length."""
        parts: list[np.ndarray] = []
        at, length = call, call.prompt_length
        while at.prompt is not None and length > 0:
            keep = at.prompt.keep
            parts += [at.ids[: max(0, length - at.prompt_length)], at.prompt.ids[: max(0, length - keep)]]
            length = min(length, keep)
            if at.prompt.base is None:
                break
            at = self.call(at.prompt.base)
        return np.concatenate([np.empty(0, IDS), *reversed(parts)])

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

    def body(self, call: Call) -> bytes:
        """The request that the harness sent. Raises zstandard.ZstdError where its bytes are damaged."""
        opened, chain = call.opened, [call.opened]
        while opened.body_base is not None:
            opened = self.call(opened.body_base).opened
            chain.append(opened)
        return restore(chain)

    def tools(self, call: Call) -> list[dict[str, Any]] | None:
        opened = call.opened
        while opened.tools_from is not None:
            opened = self.call(opened.tools_from).opened
        return opened.tools


def read(path: Path) -> SessionLog:
    """Reads a log file, packed (`.zst`) or plain. Raises ServerFault `log_unreadable` when not even a header stands,
    or when good frames contradict each other."""
    data = path.read_bytes()
    return parse(unpack(data) if path.suffix == ".zst" else data, path.name)


def parse(data: bytes, name: str = "session log") -> SessionLog:
    """As `read`, from the bytes of a plain log."""
    gathering: _Gathering | None = None
    good = 0
    try:
        for payload, end in payloads(data):
            record: Record = from_msgpack(payload, Record)  # type: ignore[arg-type]
            if gathering is None:
                gathering = _Gathering(_checked_header(record))
            else:
                gathering.take(record)
            good = end
    except (msgspec.MsgspecError, _Contradiction) as error:
        raise ServerFault(f"{name} cannot be read: {error}", name="log_unreadable") from error
    if gathering is None:
        raise ServerFault(f"{name} has no readable header: it is not a session log", name="log_unreadable")
    return gathering.log(torn=good != len(data))


class _Contradiction(Exception):
    pass


def _checked_header(record: Record) -> Header:
    if not isinstance(record, Header):
        raise _Contradiction("its first record is no header")
    if record.schema_version not in READABLE:
        raise _Contradiction(f"it has schema {record.schema_version}, not one of {READABLE}")
    return record


class _GatheredCall:
    """A call whose chunks are joined as they are read: a log of many small chunks costs no object a token."""

    def __init__(self, opened: Opened) -> None:
        self.opened = opened
        self.prompt: Prompt | None = None
        self.finished: Finished | None = None
        self.delivered = False
        self.joined = 0
        self._ids = bytearray()
        self._logprobs = bytearray()
        self._aligned = True
        self._spans: list[VersionSpan] = []

    def take(self, chunk: Chunk) -> None:
        start = len(self._ids) // IDS.itemsize
        end = start + len(chunk.ids)
        self._ids += chunk.ids.tobytes()
        if chunk.logprobs is not None:
            self._logprobs += chunk.logprobs.tobytes()
        self._aligned &= end == len(self._logprobs) // LOGPROBS.itemsize
        if chunk.version is not None and end > start:
            self._add_span(start, end, chunk.version)

    def _add_span(self, start: int, end: int, version: str) -> None:
        if self._spans and self._spans[-1][1:] == (start, version):
            start = self._spans.pop()[0]
        self._spans.append((start, end, version))

    def call(self) -> Call:
        return Call(
            opened=self.opened,
            prompt=self.prompt,
            ids=np.frombuffer(bytes(self._ids), IDS),
            logprobs=np.frombuffer(bytes(self._logprobs), LOGPROBS) if self._aligned else None,
            spans=self._spans,
            finished=self.finished,
            delivered=self.delivered,
            joined=self.joined,
        )


class _Gathering:
    def __init__(self, header: Header) -> None:
        self.header = header
        self.calls: list[_GatheredCall] = []
        self.refusals: list[Refused] = []
        self.sealed: Sealed | None = None

    def take(self, record: Record) -> None:
        match record:
            case Opened():
                self._open(record)
            case Prompt():
                self._check_earlier(record.base, record.call)
                self._call(record.call).prompt = record
            case Chunk():
                self._call(record.call).take(record)
            case Finished():
                self._call(record.call).finished = record
            case Delivered():
                self._call(record.call).delivered = True
            case Joined():
                self._call(record.call).joined += 1
            case Refused():
                self.refusals.append(record)
            case Sealed():
                self.sealed = record
            case Header():
                raise _Contradiction("it has a second header")

    def log(self, *, torn: bool) -> SessionLog:
        calls = [gathered.call() for gathered in self.calls]
        return SessionLog(header=self.header, calls=calls, refusals=self.refusals, sealed=self.sealed, torn=torn)

    def _open(self, opened: Opened) -> None:
        if opened.call != len(self.calls) + 1:
            raise _Contradiction(f"call {opened.call} was opened as number {len(self.calls) + 1}")
        self._check_earlier(opened.messages_base, opened.call)
        self._check_earlier(opened.tools_from, opened.call)
        self._check_earlier(opened.body_base, opened.call)
        self.calls.append(_GatheredCall(opened))

    def _call(self, number: int) -> _GatheredCall:
        if not 1 <= number <= len(self.calls):
            raise _Contradiction(f"it has a record of call {number}, which was never opened")
        return self.calls[number - 1]

    def _check_earlier(self, base: int | None, number: int) -> None:
        if base is not None and not 1 <= base < number:
            raise _Contradiction(f"call {number} stands on call {base}, which is not an earlier one")
