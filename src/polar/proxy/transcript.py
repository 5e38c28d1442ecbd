"""What the log is told of a call, in order: opened, its prompt, tokens by policy version, its end, who has had it."""

from __future__ import annotations

import time
from contextlib import suppress
from itertools import groupby

import numpy as np

from polar.errors import PolarError, ServerFault
from polar.protocols import Piece
from polar.proxy.canonical import Message
from polar.proxy.conversation import Conversation, Place, Plan
from polar.records import IDS, LOGPROBS, VersionSpan
from polar.sessionlog import Chunk, Delivered, Finished, Joined, LogWriter, Opened


class Transcript:
    """`number` None: not opened yet. Raises ServerFault when the log takes no more."""

    def __init__(self, log: LogWriter, conversation: Conversation) -> None:
        self.number: int | None = None
        self.count = 0
        self.has_prompt = False
        self._log = log
        self._conversation = conversation
        self._ids = np.empty(0, IDS)
        self._chunk: list[Piece] = []
        self._chunks: list[Chunk] = []
        self._joins = 0
        self._first_token_at: float | None = None

    @property
    def ids(self) -> np.ndarray:
        """All that was sampled [n], as far as it is flushed."""
        return self._ids

    @property
    def logprobs(self) -> list[float]:
        """One of each of `ids`, as far as it is flushed and not finished; NaN where the engine told none."""
        missing = float("nan")
        return [
            value
            for chunk in self._chunks
            for value in (chunk.logprobs.tolist() if chunk.logprobs is not None else [missing] * len(chunk.ids))
        ]

    def opened(self, record: Opened, place: Place, plan: Plan | None) -> None:
        """`plan`: the prompt, where it is known already."""
        prompt = [] if plan is None else [self._conversation.prompt(record.call, place, plan)]
        self._log.append(record, *prompt)
        self.number, self.has_prompt = record.call, bool(prompt)
        self._conversation.opened(record.call, place)
        self._record_joins()

    def prompt(self, place: Place, plan: Plan) -> None:
        self._log.append(self._conversation.prompt(self._call, place, plan))
        self.has_prompt = True

    def take(self, piece: Piece) -> None:
        if len(piece.ids):
            self._first_token_at = self._first_token_at or time.time()
            self.count += len(piece.ids)
            self._chunk.append(piece)
        if piece.versions:
            self._chunk = _by_version(_joined(self._chunk), piece.versions)

    def flush(self) -> None:
        """At the end of an engine's answer: the pieces of one policy version become one record, which is written
        with the next one."""
        pieces, self._chunk = self._chunk, []
        for version, group in groupby(pieces, key=lambda piece: piece.version):
            part = _joined(list(group))
            self._chunks.append(Chunk(call=self._call, ids=part.ids, logprobs=part.logprobs, version=version))
            self._ids = np.concatenate([self._ids, part.ids])
        if pieces:
            self._conversation.sampled(self._call, self._ids)

    def finished(self, place: Place, message: Message, last: Piece, *, reason: str, text: str, over: bool) -> None:
        self._write(
            Finished(
                call=self._call,
                at=time.time(),
                finish_reason=reason,
                matched=last.matched,
                message=message,
                text=text,
                first_token_at=self._first_token_at,
                over_limit=over,
                usage=last.usage,
            )
        )
        self._conversation.answered(self._call, place, message)

    def cut(self, reason: str, fault: PolarError | None = None) -> None:
        """The end of a call without an answer. A full disk is the session's fault already."""
        if self.number is None:
            return
        with suppress(ServerFault):
            self.flush()
            self._write(
                Finished(
                    call=self.number,
                    at=time.time(),
                    finish_reason=reason,
                    first_token_at=self._first_token_at,
                    fault=fault.name if fault else None,
                    error=fault.message if fault else None,
                )
            )

    def delivered(self) -> None:
        self._log.append(Delivered(call=self._call, at=time.time()))
        self._conversation.delivered(self._call)

    def joined(self) -> None:
        """A repeat of the call, also of one that is not opened yet."""
        self._joins += 1
        self._record_joins()

    def _write(self, end: Finished) -> None:
        self._log.append(*self._chunks, end)
        self._chunks = []

    @property
    def _call(self) -> int:
        assert self.number is not None, "opened comes first"
        return self.number

    def _record_joins(self) -> None:
        while self._joins and self.number is not None:
            self._joins -= 1
            self._log.append(Joined(call=self.number, at=time.time()))


def _joined(pieces: list[Piece]) -> Piece:
    known = [piece.logprobs for piece in pieces if piece.logprobs is not None]
    logprobs = np.concatenate(known).astype(LOGPROBS) if pieces and len(known) == len(pieces) else None
    return Piece(ids=np.concatenate([np.empty(0, IDS), *(piece.ids for piece in pieces)]), logprobs=logprobs)


def _by_version(whole: Piece, versions: list[VersionSpan]) -> list[Piece]:
    """The piece cut at the spans; what none covers has no version."""
    labels: list[str | None] = [None] * len(whole.ids)
    for start, end, version in versions:
        labels[start:end] = [version] * len(labels[start:end])
    pieces, at = [], 0
    for label, group in groupby(labels):
        end = at + len(list(group))
        logprobs = None if whole.logprobs is None else whole.logprobs[at:end]
        pieces.append(Piece(ids=whole.ids[at:end], logprobs=logprobs, version=label))
        at = end
    return pieces
