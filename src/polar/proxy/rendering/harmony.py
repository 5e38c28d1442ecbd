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
from polar.proxy.rendering.parsing import CallForm, Markers, Scanner, Tools, call_of

CHANNEL, MESSAGE = "<|channel|>", "<|message|>"
ANALYSIS = CHANNEL + "analysis" + MESSAGE
_HEADER = 64
"""longer than the header of a final block"""
_AFTER_BODY = ("<|end|>", "<|call|>", "<|return|>", "<|start|>")
_END = re.compile(r"<\|(?:end|call|return)\|>(?:<\|start\|>assistant)?|<\|start\|>assistant|(?=<\|start\|>)|\Z")
_KIND = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=(\S*?)(?=[\s<]|\Z)")


class _Block(msgspec.Struct):
    """`raw`: all of it; `body` starts at `start` of the answer."""

    kind: str
    recipient: str
    body: str
    raw: str
    start: int

    @property
    def visible(self) -> bool:
        return self.kind in ("final", "commentary") and not self.recipient


class Harmony:
    """Implements `Format`."""

    signs: tuple[str, ...] = (CHANNEL,)
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ("<|return|>", "<|call|>")
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
    """Relays what `final` says, and before it, at once, the thinking and what was said on the way."""

    def __init__(self, opened: str, tools: bool, stops: Sequence[str]) -> None:
        self._held = opened
        self._tools = tools
        self._blocks: list[_Block] = []
        self._markers = Markers([*stops, *_AFTER_BODY])
        self._stops = Markers(stops)
        self._state = "start"

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        news = self._held[-len(text) - _HEADER :]
        if self._state == "start":
            self._start()
        deltas: list[Delta] = []
        if self._state == "channels" and MESSAGE in news and "final" in news:
            deltas = self._final()
        if self._state in ("text", "final"):
            deltas += self._relay()
        return deltas

    def _start(self) -> None:
        seen = self._held.lstrip()
        if _in_channels(seen):
            self._state = "channels"
        elif not any(start.startswith(seen) for start in _STARTS):
            self._state = "text"

    def _final(self) -> list[Delta]:
        news = list(_blocks(self._held))
        at = next((at for at, block in enumerate(news) if block.visible and block.kind == "final"), None)
        # The last block may go on, and so may the end of the one before it.
        whole = news[:-2] if at is None else news[:at]
        self._blocks += whole
        if at is None:
            self._held = self._held[sum(len(block.raw) for block in whole) :]
            return []
        reasoning, seen, _ = _sorted(self._blocks, self._tools)
        self._held = "".join(f"{text}\n" for text in seen) + self._held[news[at].start :]
        self._state = "final"
        return [Delta(kind="reasoning", text=reasoning)] if reasoning else []

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
        header = text[at:middle]
        kind, recipient = _KIND.search(header), _RECIPIENT.search(header)
        yield _Block(
            kind=kind[1] if kind else "",
            recipient=recipient[1] if recipient else "",
            body=text[start : end.start()],
            raw=text[at : end.end()],
            start=start,
        )
        at = end.end()
    if text[at:].strip():
        yield _Block(kind="", recipient="", body="", raw=text[at:], start=len(text))


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
