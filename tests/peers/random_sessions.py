"""Random session trees as records, and what is true of them, told independently of the reader and the builders.

A session is drawn as one string of bytes, each deciding one thing: quick to draw, and it shrinks to few, simple calls.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from hypothesis import strategies as st

from peers.session_logs import Message, common, header
from polar.records import IDS, LOGPROBS
from polar.sessionlog import (
    Chunk,
    Delivered,
    Finished,
    Joined,
    LogWriter,
    Opened,
    Prompt,
    Record,
    Refused,
    SessionLog,
    read,
)

NAN, INF = float("nan"), float("inf")
BAD_LOGPROBS = [NAN, -INF, INF, -9999.0, -1e30]
TOOLS = [{"type": "function", "function": {"name": "look"}}]


@dataclass
class TrueCall:
    """What the engine and the harness saw of one call: whole prompt, tokens one by one, messages as lists."""

    number: int
    prompt: list[int] | None
    messages: list[Message]
    tools: list[Message] | None
    auxiliary: bool
    base: int | None = None
    expected: int | None = None
    source: str | None = None
    why: str | None = None
    sampled: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[str | None] = field(default_factory=list)
    aligned: bool = True
    finish: str | None = None
    answer: Message | None = None
    over_limit: bool = False
    constrained: bool = False
    images: bool = False
    temperature: float = 1.0
    top_k: int = -1
    mode: str | None = None
    delivered: bool = False
    joined: int = 0

    @property
    def sequence(self) -> list[int]:
        assert self.prompt is not None
        return self.prompt + self.sampled

    @property
    def conversation(self) -> list[Message]:
        return self.messages + ([self.answer] if self.answer else [])


@dataclass
class TrueSession:
    calls: list[TrueCall]
    refused: int

    def call(self, number: int) -> TrueCall:
        return self.calls[number - 1]


class Choices:
    """Bytes as decisions; behind their end every decision is the first, simplest one."""

    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)

    def of(self, count: int) -> int:
        return next(self._bytes, 0) % count

    def one(self, *options: Any) -> Any:
        return options[self.of(len(options))]


class _Drawing:
    """Draws calls one after another. The records of a call may be held back behind those of calls that do not stand
    on it, as when calls run side by side."""

    def __init__(self, choices: Choices) -> None:
        self.choices = choices
        self.records: list[Record] = []
        self.held: dict[int, list[Record]] = {}
        self.known: list[TrueCall] = []
        # Few different ids make sequences meet by chance, which only the ids can tell.
        self.alphabet = choices.one(1000, 2, 4)

    def ids(self, *lengths: int) -> list[int]:
        return [self.choices.of(self.alphabet) for _ in range(self.choices.one(*lengths))]

    def call(self) -> None:
        c, number = self.choices, len(self.known) + 1
        with_prompt = [call for call in self.known if call.prompt is not None]
        back = c.of(len(with_prompt)) if with_prompt and c.of(2) else 0
        before = with_prompt[-1 - back] if with_prompt else None
        prompt, source, sibling = self._prompt(before)
        self._release(None if sibling else before)
        if before is not None and before.number in self.held:
            before = None
        messages, opened = self._messages(number, before)
        true = TrueCall(number, prompt, messages, self._tools(opened), opened.auxiliary)
        _fold_into(true, [opened])
        self.known.append(true)
        self.records.append(opened)
        tail: list[Record] = self._chunks(number)
        if c.of(24) != 23:
            record = self._prompt_record(true, before, source)
            tail.insert(len(tail) if source == "engine" and c.of(2) else 0, record)
        else:
            true.prompt = None
        tail += self._ending(number)
        held = c.of(len(tail) + 1) if c.of(4) == 3 else 0
        self.records += tail[: len(tail) - held]
        if held:
            self.held[number] = tail[len(tail) - held :]
        _fold_into(true, tail)

    def _release(self, before: TrueCall | None) -> None:
        """A call stands on what is already in the log; all else may come later."""
        for number in sorted(self.held):
            if (before is not None and number == before.number) or self.choices.of(2):
                self.records += self.held.pop(number)

    def finish(self) -> list[Record]:
        for number in sorted(self.held):
            self.records += self.held[number]
        return self.records

    def _prompt(self, before: TrueCall | None) -> tuple[list[int], str, bool]:
        """The prompt, its source, and whether it may run beside the call that it resembles."""
        c, new = self.choices, self.ids(2, 1, 3, 4, 0)
        if before is None or before.prompt is None:
            return new, "rendered", True
        sequence = before.sequence
        kind = c.of(10)
        if kind < 5:
            return sequence + new, c.one("continued", "rendered", "engine"), False
        if kind == 5:
            return list(before.prompt), "rendered", True
        if kind == 6:
            return sequence[: c.of(len(sequence) + 1)] + new, "rendered", False
        if kind == 7:
            return sequence[: len(sequence) // 3] + new + sequence[2 * len(sequence) // 3 :], "rendered", False
        if kind == 8 and sequence:
            at = c.of(len(sequence))
            return [*sequence[:at], sequence[at] + 1, *sequence[at + 1 :], *new], "engine", False
        return new, "rendered", False

    def _complete(self, call: TrueCall) -> bool:
        return call.number not in self.held

    def _prompt_record(self, call: TrueCall, before: TrueCall | None, source: str) -> Prompt:
        assert call.prompt is not None
        c, base, keep = self.choices, None, 0
        candidates = [known for known in self.known[:-1] if known.prompt is not None and self._complete(known)]
        if candidates and before is not None and c.of(6) != 5:
            chosen = before if c.of(4) != 3 else candidates[c.of(len(candidates))]
            base, keep = chosen.number, common(call.prompt, chosen.sequence)
            keep = c.of(keep + 1) if c.of(4) == 3 else keep
        expected = before.number if before is not None and c.of(4) != 3 else None
        call.base, call.expected, call.source = base, expected, source
        if source == "rendered" and expected is not None:
            call.why = ("reasoning", "no_bridge")[call.number % 2]
        known = {"base": base, "keep": keep, "source": source, "why": call.why, "expected": expected}
        return Prompt(call=call.number, ids=np.asarray(call.prompt[keep:], IDS), **known)

    def _messages(self, number: int, before: TrueCall | None) -> tuple[list[Message], Opened]:
        c = self.choices
        new = [{"role": "user", "content": f"{number}.{i}"} for i in range(c.of(3))]
        messages = new
        if before is not None:
            history = before.conversation
            messages = (history if c.of(4) != 3 else history[: c.of(len(history) + 1)]) + new
        base, keep = None, 0
        if self.known and c.of(6) != 5:
            chosen = before if before is not None and c.of(4) != 3 else self.known[c.of(len(self.known))]
            base = chosen.number if self._complete(chosen) else None
            keep = common(messages, chosen.conversation) if base else 0
        opened = Opened(
            call=number,
            at=float(number),
            dialect="openai_chat",
            body=b"",
            model="policy",
            auxiliary=c.of(6) == 5,
            constrained=number % 7 == 6,
            images=number % 10 == 9,
            sampling={"temperature": (1.0, 1.0, 0.7, 0.0)[number % 4], "top_k": (-1, -1, 2)[number % 3]},
            messages_base=base,
            messages_keep=keep,
            messages=messages[keep:],
            tools=c.one(None, TOOLS),
        )
        if self.known and c.of(2):
            opened.tools_from, opened.tools = self.known[c.of(len(self.known))].number, None
        return messages, opened

    def _tools(self, opened: Opened) -> list[Message] | None:
        return self.known[opened.tools_from - 1].tools if opened.tools_from is not None else opened.tools

    def _chunks(self, number: int) -> list[Record]:
        c, chunks = self.choices, []
        for _ in range(c.one(1, 2, 3, 0)):
            ids = self.ids(2, 3, 1, 0)
            logprobs: list[float] | None = [-0.25 * (1 + c.of(9)) for _ in ids]
            trouble = c.of(24)
            if trouble == 23:
                logprobs = None
            elif trouble == 22:
                logprobs = [*logprobs, -1.0]
            elif trouble == 21 and ids:
                logprobs[c.of(len(ids))] = BAD_LOGPROBS[c.of(len(BAD_LOGPROBS))]
            values = None if logprobs is None else np.asarray(logprobs, LOGPROBS)
            version = c.one("7", "8", None)
            chunks.append(Chunk(call=number, ids=np.asarray(ids, IDS), logprobs=values, version=version))
        return chunks

    def _ending(self, number: int) -> list[Record]:
        c, records = self.choices, []
        if c.of(12) != 11:
            reason = c.one("stop", "tool_calls", "stop", "length", "stop", "stop", "tool_calls", "abort", "error")
            answer = {"role": "assistant", "content": f"answer {number}"} if c.of(8) != 7 else None
            over = c.of(12) == 11
            usage = {"prompt_tokens": 3, "completion_tokens": 2}
            records.append(
                Finished(call=number, at=1.0, finish_reason=reason, message=answer, over_limit=over, usage=usage)
            )
        records += [Joined(call=number, at=1.0)] * (c.of(12) == 11)
        records += [Delivered(call=number, at=1.0)] * (c.of(5) != 4)
        return records


def _fold_into(call: TrueCall, records: list[Record]) -> None:
    """Adds what the records say to the call, token by token."""
    for record in records:
        match record:
            case Opened():
                call.constrained, call.images = record.constrained, record.images
                call.temperature, call.top_k = record.sampling["temperature"], record.sampling["top_k"]
            case Chunk():
                ids = record.ids.tolist()
                call.sampled += ids
                call.versions += [record.version] * len(ids)
                given = record.logprobs.tolist() if record.logprobs is not None else []
                call.aligned &= len(given) == len(ids)
                call.logprobs += (given + [NAN] * len(ids))[: len(ids)]
            case Finished():
                call.finish, call.answer, call.over_limit = record.finish_reason, record.message, record.over_limit
            case Joined():
                call.joined += 1
            case Delivered():
                call.delivered = True


@dataclass
class RandomSession:
    """Records to be written, what was intended of each call's prompt and messages, how many bytes to tear off, and of
    which distribution the engine says its logprobs are."""

    records: list[Record]
    intended: list[TrueCall]
    torn: int
    mode: str | None

    def write(self, folder: Path) -> tuple[SessionLog, TrueSession]:
        """The log read back from a real file, and the truth about what survived of it."""
        path = folder / "random.log"
        writer = LogWriter(path, msgspec.structs.replace(header(), logprob_mode=self.mode))
        start = path.stat().st_size
        ends = []
        for record in self.records:
            writer.append(record)
            ends.append(path.stat().st_size)
        if self.torn:
            writer.close()
            size = max(start, path.stat().st_size - self.torn)
            path.write_bytes(path.read_bytes()[:size])
        else:
            size = ends[-1] if ends else start
            writer.seal()
        log = read(path)
        path.unlink()
        return log, self._truth([record for record, end in zip(self.records, ends, strict=True) if end <= size])

    def _truth(self, survived: list[Record]) -> TrueSession:
        calls = []
        for opened in (record for record in survived if isinstance(record, Opened)):
            meant = self.intended[opened.call - 1]
            own = [record for record in survived if getattr(record, "call", None) == opened.call]
            prompted = any(isinstance(record, Prompt) for record in own)
            call = TrueCall(
                opened.call, meant.prompt if prompted else None, meant.messages, meant.tools, meant.auxiliary
            )
            call.mode = self.mode
            if prompted:
                call.base, call.expected = meant.base, meant.expected
                call.source, call.why = meant.source, meant.why
            _fold_into(call, own)
            calls.append(call)
        return TrueSession(calls, sum(isinstance(record, Refused) for record in survived))


def draw_session(data: bytes) -> RandomSession:
    choices = Choices(data)
    drawing = _Drawing(choices)
    torn = choices.of(200) if choices.of(4) == 3 else 0
    for _ in range(1 + choices.of(10)):
        drawing.call()
        if choices.of(16) == 15:
            drawing.records.append(Refused(at=1.0, dialect="openai_chat", reason="limit", detail=""))
    mode = choices.one("sampling_temperature", "sampling_temperature", "raw", "processed", None)
    return RandomSession(drawing.finish(), drawing.known, torn, mode)


random_sessions = st.binary(min_size=160, max_size=600).map(draw_session)
