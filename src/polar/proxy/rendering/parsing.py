"""Sampled text to an assistant message, whole or while it is sampled: both ways give the same message.

Reasoning stands between <think> and </think> at the start. What is malformed stays text, and nothing here ever raises.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from polar.protocols import Delta

Tools = list[dict[str, Any]] | None
Found = tuple[int, int, dict[str, Any] | None]
"""a stretch of the text, and the call that it is; None: it looked like one"""

THINK, END_THINK = "<think>", "</think>"
_NOISE = 16
"""malformed calls in one answer; what is behind them is not looked at, since each costs a look at all of it"""


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


# strict=False: policies write line breaks inside strings.
_JSON = json.JSONDecoder(strict=False, parse_constant=_refuse)


def json_at(text: str, start: int) -> tuple[Any, int] | None:
    """The JSON value that starts at `start` or behind spaces, and the offset behind it and its spaces."""
    try:
        value, end = _JSON.raw_decode(text, skip_spaces(text, start))
    except (ValueError, RecursionError):
        return None
    return value, skip_spaces(text, end)


def skip_spaces(text: str, at: int) -> int:
    while at < len(text) and text[at].isspace():
        at += 1
    return at


def arguments_of(text: str) -> Any:
    """What the JSON text of a tool call's arguments says; the text itself where it says nothing readable (case 9)."""
    if not text.strip():
        return {}
    try:
        value = _JSON.decode(text)
    except (ValueError, RecursionError):
        return text
    return {} if value is None else value


def call_of(name: Any, arguments: Any) -> dict[str, Any] | None:
    """A canonical call without an id; None where the name is none, or the arguments are no map."""
    if not isinstance(name, str) or not name:
        return None
    if isinstance(arguments, str):
        text, arguments = arguments, arguments_of(arguments)
    else:
        # A policy may write half a surrogate pair as an escape.
        text = json.dumps(arguments, ensure_ascii=False).encode(errors="replace").decode()
    return {"type": "function", "function": {"name": name, "arguments": text}} if isinstance(arguments, dict) else None


class CallForm(NamedTuple):
    """What stands around the name and the arguments of a call, which are JSON, up to its end."""

    before_name: str
    before_arguments: str
    end: str


class Scanner(Protocol):
    """Text in pieces of any size in; out comes what may be relayed: never more than `Format.parse` makes of it all."""

    def feed(self, text: str) -> list[Delta]: ...


class Format(Protocol):
    """How a family of models writes reasoning and tool calls."""

    @property
    def signs(self) -> tuple[str, ...]:
        """Text of a chat template that has this format."""
        ...

    @property
    def markers(self) -> tuple[str, ...]:
        """What may stand at the end of an answer and belongs to it."""
        ...

    @property
    def ends(self) -> tuple[str, ...]:
        """Tokens that end a turn beside the template's own, where the vocabulary has them."""
        ...

    @property
    def end_of_thinking(self) -> str:
        """ "": reasoning has no end of its own."""
        ...

    @property
    def call_form(self) -> CallForm | None:
        """None: calls are not JSON between two texts."""
        ...

    def opens_reasoning(self, prompt: str) -> bool:
        """Whether the prompt leaves the answer inside the reasoning."""
        ...

    def parse(self, text: str, tools: Tools, *, reasoning_open: bool) -> dict[str, Any]:
        """The canonical assistant message, its calls without ids. No `tools`: none were offered, markup is text."""
        ...

    def scanner(self, tools: Tools, *, reasoning_open: bool, stops: Sequence[str]) -> Scanner: ...


class Markup:
    """A `Format` of text with reasoning first and calls in markup; `found` is what makes the difference."""

    signs: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    ends: tuple[str, ...] = ()
    opens: tuple[str, ...] = ()
    """what may begin a call"""
    end_of_thinking: str = END_THINK
    call_form: CallForm | None = None
    opens_alone: tuple[str, ...] = ()
    """what may begin one at the start of the answer, and nowhere else"""

    def found(self, text: str, tools: list[dict[str, Any]]) -> Iterator[Found]:
        raise NotImplementedError

    def opens_reasoning(self, prompt: str) -> bool:
        return prompt.rstrip().endswith(THINK)

    def parse(self, text: str, tools: Tools, *, reasoning_open: bool) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        reasoning, rest = _split_reasoning(text, reasoning_open)
        if reasoning:
            message["reasoning_content"] = reasoning
        content, calls = self._split_calls(rest, tools) if tools else (rest, [])
        message["content"] = content
        if calls:
            message["tool_calls"] = calls
        return message

    def scanner(self, tools: Tools, *, reasoning_open: bool, stops: Sequence[str]) -> Scanner:
        opens, alone = (self.opens, self.opens_alone) if tools else ((), ())
        return _MarkupScanner(opens, alone, reasoning_open=reasoning_open, stops=stops)

    def _split_calls(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        outside, calls, at, malformed = "", [], 0, 0
        for start, end, call in self.found(text, tools):
            outside += text[at:start] if call else text[at:end]
            calls += [call] if call else []
            at = end
            malformed += call is None
            if malformed == _NOISE:
                break
        outside += text[at:]
        return (outside.rstrip(), calls) if calls else (outside, calls)


def _split_reasoning(text: str, reasoning_open: bool) -> tuple[str, str]:
    start = text.lstrip()
    if start.startswith(THINK):
        start = start[len(THINK) :]
    elif not reasoning_open:
        return "", text
    reasoning, _, rest = start.partition(END_THINK)
    return reasoning.strip(), rest.lstrip("\n")


class _MarkupScanner:
    def __init__(
        self, opens: Sequence[str], alone: Sequence[str], *, reasoning_open: bool, stops: Sequence[str]
    ) -> None:
        self._markers = Markers([*stops, *opens])
        self._thinking = Markers([END_THINK, *stops])
        self._thoughts = Stripped()
        self._alone = tuple(alone)
        self._trims = bool(opens)
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
            self._state = "opening" if self._held else "trim"
        if self._state == "opening":
            self._open()
        if self._state == "text":
            deltas += self._relay()
        return deltas

    def _start(self) -> None:
        seen = self._held.lstrip()
        if seen.startswith(THINK):
            self._state, self._held = "reasoning", seen[len(THINK) :]
        elif not THINK.startswith(seen):
            self._state = "reasoning" if self._reasoning_open else "opening"

    def _reason(self) -> list[Delta]:
        safe, found = self._thinking.before(self._held)
        said, self._held = self._thoughts.feed(safe), self._held[len(safe) :]
        if self._held.startswith(END_THINK):
            self._state, self._held = "trim", self._held[len(END_THINK) :]
        elif found:
            self._state = "held"
        return [Delta(kind="reasoning", text=said)] if said else []

    def _open(self) -> None:
        seen = self._held.lstrip()
        if seen or not self._alone:
            self._state = "held" if seen.startswith(self._alone) else "text"

    def _relay(self) -> list[Delta]:
        safe, found = self._markers.before(self._held)
        if found:
            self._state = "held"
        if self._trims:
            safe = safe.rstrip()
        self._held = self._held[len(safe) :]
        return [Delta(kind="text", text=safe)] if safe else []


class Stripped:
    """Text in pieces of any size in; out come the same pieces of what strip() leaves of it all."""

    def __init__(self) -> None:
        self._begun = False
        self._spaces = ""

    def feed(self, text: str) -> str:
        text = self._spaces + text if self._begun else text.lstrip()
        said = text.rstrip()
        self._begun, self._spaces = self._begun or bool(said), text[len(said) :]
        return said


class Markers:
    """Texts behind whose beginning nothing may be relayed."""

    def __init__(self, markers: Sequence[str]) -> None:
        self._markers = [marker for marker in markers if marker]

    def before(self, text: str) -> tuple[str, bool]:
        """The start of `text` that no marker is in, nor can prove to be in; and whether one stands behind it."""
        found = [at for marker in self._markers if (at := text.find(marker)) >= 0]
        if found:
            return text[: min(found)], True
        return text[: len(text) - max((_overlap(text, marker) for marker in self._markers), default=0)], False


def _overlap(text: str, marker: str) -> int:
    """Length of the longest end of `text` that `marker` starts with."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
