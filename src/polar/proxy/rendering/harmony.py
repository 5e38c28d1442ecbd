"""Answers in channels: thinking in `analysis`, calls in `commentary` to a function, what the user sees in `final`.

An answer is a row of blocks: a header, <|message|>, a body and an end. The first block's role stands in the prompt. A
block that is none of these stays text, and so does an answer that starts in no channel.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from polar.protocols import Delta
from polar.proxy.rendering.parsing import CallForm, Markers, Scanner, Stripped, Tools, call_of

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ANALYSIS = CHANNEL + "analysis" + MESSAGE
_OPENING = "<|start|>assistant"
_LONGEST_END = len("<|return|>" + _OPENING)
_AFTER_BODY = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile(r"<\|(?:end|call|return)\|>(?:<\|start\|>assistant)?|<\|start\|>assistant|(?=<\|start\|>)|\Z")
_KIND = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(\S*?)(?=[\s<]|\Z)")


class _Block(msgspec.Struct):
    """`raw`: all of it."""

    kind: str
    recipient: str
    body: str
    raw: str

    @property
    def visible(self) -> bool:
        return self.kind in ("final", "commentary") and not self.recipient


class Harmony:
    """Implements `Format`."""

    signs: tuple[str, ...] = (CHANNEL,)
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ("<|return|>", "<|call|>")
    end_of_thinking: str = ""
    call_form: CallForm | None = None

    def opens_reasoning(self, prompt: str) -> bool:
        return prompt.endswith(ANALYSIS)

    def parse(self, text: str, tools: Tools, *, reasoning_open: bool) -> dict[str, Any]:
        text = ANALYSIS + text if reasoning_open else text
        if not _in_channels(text):
            return {"role": "assistant", "content": text}
        reasoning, seen, calls = _sorted(list(_blocks(text)), bool(tools))
        message: dict[str, Any] = {"role": "assistant", "content": "\n".join(seen)}
        message |= {"reasoning_content": reasoning} if reasoning else {}
        return message | ({"tool_calls": calls} if calls else {})

    def scanner(self, tools: Tools, *, reasoning_open: bool, stops: Sequence[str]) -> Scanner:
        return _HarmonyScanner(ANALYSIS if reasoning_open else "", bool(tools), stops)


class _HarmonyScanner:
    """Relays the thinking as it comes, and what `final` says; what was said on the way waits for `final`."""

    def __init__(self, opened: str, tools: bool, stops: Sequence[str]) -> None:
        self._held = opened
        self._tools = tools
        self._blocks: list[_Block] = []
        """those before the one that comes, without the thinking"""
        self._thoughts = Stripped()
        self._thought = False
        self._gap = ""
        """between two thoughts"""
        self._header: tuple[str, str] = "", ""
        self._start_at = self._read = 0
        self._markers = Markers([*stops, *_AFTER_BODY])
        self._stops = Markers(stops)
        self._state = "start"

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        if self._state == "start":
            self._start()
        deltas: list[Delta] = []
        before = None
        while before != (before := (self._state, len(self._held))):
            if self._state == "header":
                self._begin()
            elif self._state == "thinking":
                deltas += self._think()
            elif self._state == "body":
                self._skip()
        if self._state in ("text", "final"):
            deltas += self._relay()
        return deltas

    def _start(self) -> None:
        seen = self._held.lstrip()
        if _in_channels(seen):
            self._state = "header"
        elif not any(start.startswith(seen) for start in _STARTS):
            self._state = "text"

    def _begin(self) -> None:
        middle = self._held.find(MESSAGE, max(0, self._read - len(MESSAGE)))
        self._read = len(self._held)
        if middle < 0:
            return
        self._header = kind, recipient = _header(self._held[:middle])
        self._start_at = self._read = middle + len(MESSAGE)
        if recipient or kind not in ("analysis", "final"):
            self._state = "body"
        elif kind == "analysis":
            self._state, self._held = "thinking", self._held[self._start_at :]
            self._thoughts, self._gap = Stripped(), "\n" if self._thought else ""
        else:
            seen = "".join(f"{text}\n" for text in _sorted(self._blocks, self._tools)[1])
            self._state, self._held = "final", seen + self._held[self._start_at :]

    def _think(self) -> list[Delta]:
        safe, found = self._markers.before(self._held)
        said, self._held = self._thoughts.feed(safe), self._held[len(safe) :]
        if found and not self._held.startswith(_AFTER_BODY):
            self._state = "held"  # by a stop string
        elif found and (end := self._end(0)):
            self._next(end)
        if not said:
            return []
        self._thought, said, self._gap = True, self._gap + said, ""
        return [Delta(kind="reasoning", text=said)]

    def _skip(self) -> None:
        end = self._end(max(self._start_at, self._read - _LONGEST_END))
        self._read = len(self._held)
        if end:
            kind, recipient = self._header
            body, raw = self._held[self._start_at : end.start()], self._held[: end.end()]
            self._blocks.append(_Block(kind=kind, recipient=recipient, body=body, raw=raw))
            self._next(end)

    def _end(self, start: int) -> re.Match[str] | None:
        """The end of the body, once it is known where that ends."""
        end = _END.search(self._held, start)
        assert end is not None, "the end of the text is an end"
        whole = end[0].endswith(_OPENING) or not _OPENING.startswith(self._held[end.end() :])
        return end if whole else None

    def _next(self, end: re.Match[str]) -> None:
        self._state, self._held, self._read = "header", self._held[end.end() :], 0

    def _relay(self) -> list[Delta]:
        markers = self._markers if self._state == "final" else self._stops
        safe, found = markers.before(self._held)
        if found:
            self._state = "held"
        self._held = self._held[len(safe) :]
        return [Delta(kind="text", text=safe)] if safe else []


_STARTS = (CHANNEL, "to=")


def _in_channels(text: str) -> bool:
    return text.lstrip().startswith(_STARTS)


def _blocks(text: str) -> Iterator[_Block]:
    at = 0
    while (middle := text.find(MESSAGE, at)) >= 0:
        start = middle + len(MESSAGE)
        end = _END.search(text, start)
        assert end is not None, "the end of the text is an end"
        kind, recipient = _header(text[at:middle])
        yield _Block(kind=kind, recipient=recipient, body=text[start : end.start()], raw=text[at : end.end()])
        at = end.end()
    if text[at:].strip():
        yield _Block(kind="", recipient="", body="", raw=text[at:])


def _header(text: str) -> tuple[str, str]:
    """Channel and recipient."""
    kind, recipient = _KIND.search(text), _RECIPIENT.search(text)
    return kind[1] if kind else "", recipient[1] if recipient else ""


def _sorted(blocks: list[_Block], tools: bool) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Reasoning, what is seen, calls. Thinking behind the final answer stays text, as all that fits nowhere."""
    reasoning: list[str] = []
    seen: list[str] = []
    calls: list[dict[str, Any]] = []
    final = False
    for block in blocks:
        name = block.recipient.removeprefix("functions.")
        call = call_of(name, block.body) if tools and name != block.recipient and block.body.strip() else None
        if call:
            calls.append(call)
        elif block.visible:
            seen.append(block.body)
            final = final or block.kind == "final"
        elif block.kind == "analysis" and not block.recipient and not final:
            reasoning.append(block.body.strip())
        else:
            seen.append(block.raw)
    return "\n".join(text for text in reasoning if text), seen, calls
