"""Sampled text to an assistant message, whole or while it is sampled: both ways give the same message.

Reasoning stands between <think> and </think> at the start; a tool call is one JSON object between <tool_call> and
</tool_call>. What is malformed stays text, and nothing here ever raises.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from polar.protocols import Delta

THINK, END_THINK = "<think>", "</think>"
CALL, END_CALL = "<tool_call>", "</tool_call>"


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# strict=False: policies write line breaks inside strings.
_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse)


def parse_text(text: str, *, tools: bool, reasoning_open: bool) -> dict[str, Any]:
    """The canonical assistant message, its tool calls without ids. `tools` False: none were offered, markup is text.
    `reasoning_open`: the prompt has opened the reasoning already."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    reasoning, rest = _split_reasoning(text, reasoning_open)
    if reasoning:
        message["reasoning_content"] = reasoning
    content, calls = _split_calls(rest) if tools else (rest, [])
    message["content"] = content
    if calls:
        message["tool_calls"] = calls
    return message


def _split_reasoning(text: str, reasoning_open: bool) -> tuple[str, str]:
    start = text.lstrip()
    if start.startswith(THINK):
        start = start[len(THINK) :]
    elif not reasoning_open:
        return "", text
    reasoning, _, rest = start.partition(END_THINK)
    return reasoning.strip(), rest.lstrip("\n")


def _split_calls(text: str) -> tuple[str, list[dict[str, Any]]]:
    outside, calls, at = "", [], 0
    while (start := text.find(CALL, at)) >= 0:
        call, end = _read_call(text, start + len(CALL))
        outside += text[at:start] if call else text[at:end]
        calls += [call] if call else []
        at = end
    outside += text[at:]
    return (outside.rstrip(), calls) if calls else (outside, calls)


def _read_call(text: str, start: int) -> tuple[dict[str, Any] | None, int]:
    """The call whose JSON starts at `start`, and the offset behind it; None with `start` when it is malformed."""
    try:
        value, end = _JSON.raw_decode(text, _skip_spaces(text, start))
    except (ValueError, RecursionError):
        return None, start
    end = _skip_spaces(text, end)
    call = _call(value)
    if call is None or not text.startswith(END_CALL, end):
        return None, start
    return call, end + len(END_CALL)


def _skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def _call(value: Any) -> dict[str, Any] | None:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return None
    arguments = value.get("arguments", {})
    if isinstance(arguments, str):
        text, arguments = arguments, arguments_of(arguments)
    else:
        text = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, dict):
        return None
    return {"type": "function", "function": {"name": value["name"], "arguments": text}}


def arguments_of(text: str) -> Any:
    """What the JSON text of a tool call's arguments says; the text itself where it says nothing readable (case 9)."""
    if not text.strip():
        return {}
    try:
        value = json.loads(text, strict=False, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value


class Scanner:
    """Text in pieces of any size in; out comes what may be relayed: never more than `parse_text` makes of it all."""

    def __init__(self, *, tools: bool, reasoning_open: bool, stops: Sequence[str]) -> None:
        self._tools = tools
        self._markers = [stop for stop in stops if stop] + ([CALL] if tools else [])
        self._reasoning_open = reasoning_open
        self._state = "start"
        self._held = ""

    def feed(self, text: str) -> list[Delta]:
        self._held += text
        deltas: list[Delta] = []
        if self._state == "start":
            self._start()
        if self._state == "reasoning":
            deltas += self._reason()
        if self._state == "trim":
            self._held = self._held.lstrip("\n")
            self._state = "text" if self._held else "trim"
        if self._state == "text":
            deltas += self._relay()
        return deltas

    def _start(self) -> None:
        seen = self._held.lstrip()
        if seen.startswith(THINK):
            self._state, self._held = "reasoning", seen[len(THINK) :]
        elif not THINK.startswith(seen):
            self._state = "reasoning" if self._reasoning_open else "text"

    def _reason(self) -> list[Delta]:
        reasoning, closed, rest = self._held.partition(END_THINK)
        if not closed:
            return []
        self._state, self._held = "trim", rest
        reasoning = reasoning.strip()
        return [Delta(kind="reasoning", text=reasoning)] if reasoning else []

    def _relay(self) -> list[Delta]:
        found = [at for marker in self._markers if (at := self._held.find(marker)) >= 0]
        if found:
            end, self._state = min(found), "held"
        else:
            end = len(self._held) - max((_overlap(self._held, marker) for marker in self._markers), default=0)
        safe = self._held[:end]
        if self._tools:
            safe = safe.rstrip()
        self._held = self._held[len(safe) :]
        return [Delta(kind="text", text=safe)] if safe else []


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` starts with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
