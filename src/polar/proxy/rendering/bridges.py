"""What a chat template writes behind a turn that was sampled: exactly that, or nothing.

A stand-in takes the turn's place, and what the template writes behind it is cut off; the id that ends a turn is never
searched for in what was said. At start the same is asked behind different histories: what hangs on them is not
prefix-stable, and messages of such a role are never bridged.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from itertools import takewhile

import msgspec
import numpy as np

from polar.errors import TaskFault
from polar.proxy.rendering.chat_template import QUESTION, TOOL, ChatTemplate, Message, call_of
from polar.proxy.rendering.tokens import Tokens

STAND_IN = "stand-in turn 4c1f"


def _answer(new: list[Message]) -> Message:
    return {"role": "assistant", "content": STAND_IN}


def _asked(new: list[Message]) -> Message:
    """A turn whose calls the results at the start of `new` answer."""
    results = list(takewhile(lambda message: message["role"] == "tool", new))
    calls = [
        call_of(result.get("name") or "tool", {"at": ""}, result.get("tool_call_id") or f"call_{at}")
        for at, result in enumerate(results)
    ]
    calls[-1]["function"]["arguments"] = {"at": STAND_IN}
    return {"role": "assistant", "content": "", "tool_calls": calls}


_SAID = {"role": "assistant", "content": "answer", "reasoning_content": "thought"}
_SYSTEM = {"role": "system", "content": "rules"}
_RESULT = {"role": "tool", "name": "tool", "tool_call_id": "call_0", "content": "result"}
_CALLED = {"role": "assistant", "content": "", "tool_calls": [call_of("tool", {"at": "x"})]}
_CALLED_TWICE = _CALLED | {"tool_calls": [call_of("tool", {"at": "x"}), call_of("tool", {"at": "y"}, "call_1")]}
_RESULTS = [_RESULT, _RESULT | {"tool_call_id": "call_1"}]
_HISTORIES: list[list[Message]] = [
    [_SYSTEM, QUESTION],
    [QUESTION, _SAID, QUESTION],
    [QUESTION, _CALLED, _RESULT],
    [_SYSTEM, QUESTION, _CALLED, _RESULT, _SAID, QUESTION],
    [QUESTION, _CALLED_TWICE, *_RESULTS, _SAID, QUESTION],
    [QUESTION, _CALLED_TWICE, *_RESULTS, QUESTION],
]
_CONTINUATIONS: list[list[Message]] = [  # of one role before those of several
    [QUESTION],
    [_RESULT],
    _RESULTS,
    [_SYSTEM],
    [_RESULT, QUESTION],
    [_RESULT, _SYSTEM],
    [QUESTION, _SAID, QUESTION],
]


class _Turn(msgspec.Struct, kw_only=True, frozen=True):
    """`markup`: how many ids stand between the stand-in and the end of its turn; `closing`: the end and what always
    follows it."""

    stand_in: Callable[[list[Message]], Message]
    markup: int
    closing: np.ndarray


class Bridges:
    """`ends`: ids that end a turn. `any`: whether there are bridges at all. `unstable`: with and without tools, the
    roles of messages that have none."""

    def __init__(self, template: ChatTemplate, tokens: Tokens, ends: Collection[int]) -> None:
        self._template = template
        self._tokens = tokens
        self._ends = ends
        self._before = {tools: self._question(tools) for tools in (False, True)}
        self._answered = self._turn(_answer, [QUESTION], longest_markup=0)
        self._called = self._turn(_asked, [_RESULT]) if template.writes_calls else self._answered
        self.any = self._answered is not None
        self.unstable = {tools: self._unstable(tools) for tools in (False, True)}

    def behind(self, sequence: np.ndarray, sampled: int, new: list[Message], tools: bool) -> np.ndarray | None:
        """What closes the turn of which the last `sampled` ids of `sequence` were sampled, as far as it is not closed
        yet, then the new messages. An end of turn is never doubled, whichever of several it is (case 12)."""
        turn = self._turn_before(new)
        if turn is None or any(message["role"] in self.unstable[tools] for message in new):
            return None
        around = self._around([QUESTION], new, tools)
        if around is None or not self._same_before(around[0], tools):
            return None
        tail = around[1]
        ids, closing = self._tokens.encode(tail)[turn.markup :], turn.closing
        if not np.array_equal(ids[: len(closing)], closing):
            return None
        own = sequence[len(sequence) - sampled :]
        return ids[_overlap(own, closing) or int(len(own) > 0 and int(own[-1]) in self._ends) :]

    def _same_before(self, head: str, tools: bool) -> bool:
        """Whether the messages behind the turn leave what is before it as it is."""
        if not head.startswith(self._before[tools]):
            self._before[tools] = self._question(tools)  # a template may write the date
        return head.startswith(self._before[tools])

    def _question(self, tools: bool) -> str:
        return self._text([QUESTION], tools, prompt=False).rstrip()

    def _turn_before(self, new: list[Message]) -> _Turn | None:
        return self._called if new and new[0]["role"] == "tool" else self._answered

    def _around(self, history: list[Message], new: list[Message], tools: bool) -> tuple[str, str] | None:
        """The text before and behind the stand-in turn; None when the template does not take the new messages there."""
        turn = self._turn_before(new)
        if turn is None:
            return None
        try:
            whole = self._text([*history, turn.stand_in(new), *new], tools, prompt=True)
        except TaskFault:
            return None
        head, found, tail = whole.partition(STAND_IN)
        return (head, tail) if found else None

    def _turn(
        self, stand_in: Callable[[list[Message]], Message], following: list[Message], longest_markup: int | None = None
    ) -> _Turn | None:
        """None when the turn has no end that could be told from what is sampled."""
        turn = stand_in(following)
        try:
            texts = [self._text([QUESTION, turn, *new], False, prompt=bool(new)) for new in ([], following)]
        except TaskFault:
            return None
        last, followed = (self._tokens.encode(text.partition(STAND_IN)[2]) for text in texts)
        markup = next((at for at, number in enumerate(last.tolist()) if number in self._ends), None)
        if markup is None or len(followed) <= markup or (longest_markup is not None and markup > longest_markup):
            return None
        if not np.array_equal(last[:markup], followed[:markup]) or int(followed[markup]) not in self._tokens.special:
            return None
        last, followed = last[markup:], followed[markup:]
        shorter = min(len(last), len(followed))
        common = next((at for at in range(shorter) if last[at] != followed[at]), shorter)
        return _Turn(stand_in=stand_in, markup=markup, closing=followed[: max(1, common)])

    def _unstable(self, tools: bool) -> frozenset[str]:
        roles = {"tool"} if self._called is None else set()
        for new in _CONTINUATIONS:
            involved = {message["role"] for message in new}
            if not roles & involved and not self._stable(new, tools):
                roles |= involved
        return frozenset(roles)

    def _stable(self, new: list[Message], tools: bool) -> bool:
        expected, *others = (self._around(history, new, tools) for history in ([QUESTION], *_HISTORIES))
        if expected is None:
            return True
        same = all(other is None or other[1] == expected[1] for other in others)
        return same and self._same_before(expected[0], tools)

    def _text(self, messages: list[Message], tools: bool, *, prompt: bool) -> str:
        return self._template.text(messages, [TOOL] if tools else None, prompt=prompt)


def _overlap(sequence: np.ndarray, closing: np.ndarray) -> int:
    """How many ids of `closing` the sequence ends with already."""
    for length in range(min(len(closing), len(sequence)), 0, -1):
        if np.array_equal(sequence[-length:], closing[:length]):
            return length
    return 0
