"""Which tokens a turn continues. A call that goes on from an earlier answer continues the ids that were sampled for it.

An attempt's messages form a tree of 64-bit digests: no text is kept, no history is copied a turn. Only changed content
makes another branch. What the wire changes without changing the conversation does not: digests are of canonical
messages, and leave out spaces at the ends, reasoning that is merely absent, the spelling of tool arguments, and the
names of tool calls' ids: a result belongs to a call, whatever it is called.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, Literal

import msgspec
import numpy as np

from polar.protocols import Rendering
from polar.proxy.canonical import Message
from polar.records import IDS
from polar.sessionlog import Prompt

Tools = list[dict[str, Any]] | None
Source = Literal["continued", "rendered", "engine"]
_SORTED = msgspec.json.Encoder(order="sorted")
_READ = msgspec.json.Decoder()


class Place(msgspec.Struct, kw_only=True):
    """Where a request's messages stand among what is known.

    `chain`: a digest after each message. `expected`: the call whose answer they continue, which with its prompt is
    their first `expected_count`. `base`: the call that shares the longest start with them, `keep` messages.
    """

    chain: list[int]
    tools_digest: int
    expected: int | None = None
    expected_count: int = 0
    base: int | None = None
    keep: int = 0


class Plan(msgspec.Struct, kw_only=True):
    """Prompt ids [n] made from messages. `why`: the reason of a rendering though an earlier call is continued."""

    ids: np.ndarray
    source: Source
    why: str | None = None


class _Known(msgspec.Struct, kw_only=True):
    base: int | None
    keep: int
    own: np.ndarray
    prompt_length: int
    sampled: np.ndarray
    delivered: bool = False
    reasoning: str = ""
    reasoned: bool = False
    """it or what it continues has reasoning"""
    call_ids: list[str] = []


class Conversation:
    def __init__(self, rendering: Rendering | None, reasoning: str = "keep") -> None:
        self._rendering = rendering
        self._policy = reasoning
        self._known: dict[int, _Known] = {}
        self._nodes: dict[int, tuple[int, int]] = {}
        self._answers: dict[int, list[int]] = {}
        self._tools: dict[int, int] = {}

    def place(self, messages: list[Message], tools: Tools) -> Place:
        at, calls = hash(_SORTED.encode(tools or None)), CallNumbers()
        place = Place(chain=[], tools_digest=at)
        repeated: list[int] = []
        edited = False
        for count, message in enumerate(messages, 1):
            at = hash((at, gist(message, calls)))
            place.chain.append(at)
            if (node := self._nodes.get(at)) is not None:
                place.base, place.keep = node
            if (answers := self._answers.get(at)) and not edited:
                same = self._same_reasoning(answers, message)
                edited = not same
                repeated, place.expected_count = (repeated, place.expected_count) if edited else (same, count)
        if repeated:
            ids = _ids(messages[place.expected_count - 1])
            place.expected = max(repeated, key=lambda number: self._likeness(number, ids))
        return place

    def continued(self, place: Place, messages: list[Message], tools: Tools) -> Plan | None:
        """A prompt that goes on from the ids of an earlier call; None where it has to be rendered. May run in a
        thread."""
        assert self._rendering is not None, "an engine that takes ids has a rendering"
        if place.expected is None or self._reason_to_render(place, messages):
            return None
        new = _named(messages[place.expected_count :], messages)
        sequence, sampled = self.sequence(place.expected), len(self._known[place.expected].sampled)
        added = self._rendering.bridge(sequence, new, tools, sampled=sampled)
        return None if added is None else Plan(ids=np.concatenate([sequence, added]), source="continued")

    def rendered(self, place: Place, messages: list[Message], tools: Tools) -> Plan:
        """A prompt for messages that `continued` has none for. Raises TaskFault `template`. May run in a thread."""
        assert self._rendering is not None, "an engine that takes ids has a rendering"
        why = None
        if place.expected is not None:
            why = self._reason_to_render(place, messages) or "no_bridge"
        return Plan(ids=self._rendering.render(_named(messages, messages), tools), source="rendered", why=why)

    def opened(self, number: int, place: Place) -> None:
        for count, at in enumerate(place.chain, 1):
            self._nodes.setdefault(at, (number, count))
        self._tools.setdefault(place.tools_digest, number)

    def tools_from(self, place: Place) -> int | None:
        """An earlier call with the same tools."""
        return self._tools.get(place.tools_digest)

    def prompt(self, number: int, place: Place, plan: Plan) -> Prompt:
        """Remembers the call's prompt, and gives its record: `keep` is as long as the earlier calls allow."""
        base, keep = self._longest_shared(place, plan)
        own = plan.ids[keep:].astype(IDS)
        continued = self._known.get(base) if base is not None and plan.source == "continued" else None
        self._known[number] = _Known(
            base=base,
            keep=keep,
            own=own,
            prompt_length=len(plan.ids),
            sampled=np.empty(0, IDS),
            reasoned=continued is not None and continued.reasoned,
        )
        return Prompt(
            call=number, base=base, keep=keep, ids=own, source=plan.source, why=plan.why, expected=place.expected
        )

    def sampled(self, number: int, ids: np.ndarray) -> None:
        """All that was sampled for the call so far."""
        if number in self._known:
            self._known[number].sampled = ids

    def answered(self, number: int, place: Place, message: Message) -> None:
        """From now on messages that repeat this answer continue the call."""
        known = self._known.get(number)
        if known is None:
            return
        known.reasoning = _plain(message.get("reasoning_content"))
        known.reasoned = known.reasoned or bool(known.reasoning)
        known.call_ids = _ids(message)
        at = hash((place.chain[-1], gist(message)))
        self._nodes.setdefault(at, (number, len(place.chain) + 1))
        self._answers.setdefault(at, []).append(number)

    def delivered(self, number: int) -> None:
        if number in self._known:
            self._known[number].delivered = True

    def sequence(self, number: int) -> np.ndarray:
        """Prompt and sampled ids of a call; linear in their number."""
        known = self._known[number]
        length = known.prompt_length + len(known.sampled)
        parts: list[np.ndarray] = []
        while length:
            own = length - known.keep
            if own == len(known.own) + len(known.sampled):
                parts += (known.sampled, known.own)
            elif own > 0:
                parts += (known.sampled[: max(0, own - len(known.own))], known.own[:own])
            length = min(length, known.keep)
            if length:
                assert known.base is not None, "only a call with a base keeps ids"
                known = self._known[known.base]
        return np.concatenate([np.empty(0, IDS), *reversed(parts)])

    def _same_reasoning(self, answers: list[int], message: Message) -> list[int]:
        """Those of the calls whose reasoning the message repeats or leaves out; edited reasoning is an edit."""
        given = _plain(message.get("reasoning_content"))
        return [number for number in answers if not given or self._known[number].reasoning == given]

    def _reason_to_render(self, place: Place, messages: list[Message]) -> str | None:
        if self._policy == "keep" or place.expected is None or not self._known[place.expected].reasoned:
            return None
        new = messages[place.expected_count :]
        in_cycle = self._policy == "tool_cycle" and all(message["role"] == "tool" for message in new)
        return None if in_cycle else "reasoning"

    def _likeness(self, number: int, call_ids: list[str]) -> tuple[bool, bool, int]:
        """Of answers that say the same, the one with these ids is meant, else the last that was delivered."""
        known = self._known[number]
        return known.call_ids == call_ids, known.delivered, number

    def _longest_shared(self, place: Place, plan: Plan) -> tuple[int | None, int]:
        if plan.source == "continued":
            assert place.expected is not None, "only a known call is continued"
            known = self._known[place.expected]
            return place.expected, known.prompt_length + len(known.sampled)
        best: tuple[int | None, int] = (None, 0)
        for number in dict.fromkeys((place.expected, place.base)):
            if number is not None and number in self._known:
                keep = _common(self.sequence(number), plan.ids)
                best = (number, keep) if keep > best[1] else best
        return best


class CallNumbers:
    """The tool calls of a conversation, counted from its start, so that their ids' names do not matter."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}
        self._count = 0

    def add(self, message: Message) -> None:
        for call_id in _ids(message):
            self._numbers[call_id] = self._count
            self._count += 1

    def of(self, call_id: str | None) -> int | str:
        return self._numbers.get(call_id or "", call_id or "")


def gist(message: Message, calls: CallNumbers | None = None) -> tuple[Hashable, ...]:
    """Equal for messages that say the same, however they are spelt. `calls`: those before it, which it adds to."""
    calls = calls or CallNumbers()
    content = message.get("content") or ""
    made = tuple(
        (call["function"]["name"], _spelling_free(call["function"]["arguments"]))
        for call in message.get("tool_calls") or []
    )
    calls.add(message)
    text = content.strip() if message["role"] == "assistant" else content.rstrip()
    images = tuple(part["image_url"]["url"] for part in message.get("parts") or [] if part["type"] == "image_url")
    return message["role"], text, made, calls.of(message.get("tool_call_id")), *images


def _ids(message: Message) -> list[str]:
    return [call.get("id") or "" for call in message.get("tool_calls") or []]


def _named(new: list[Message], messages: list[Message]) -> list[Message]:
    """`new` with the name of its tool in every result, which some templates write; the calls stand in `messages`."""
    wanted = {message.get("tool_call_id") for message in new if message["role"] == "tool" and not message.get("name")}
    names: dict[str | None, str] = {}
    for message in reversed(messages):
        if len(names) == len(wanted):
            break
        for call in message.get("tool_calls") or []:
            if call.get("id") in wanted:
                names.setdefault(call["id"], call["function"]["name"])
    return [
        {"name": names[message["tool_call_id"]], **message} if message.get("tool_call_id") in names else message
        for message in new
    ]


def _spelling_free(arguments: str) -> bytes | str:
    try:
        return _SORTED.encode(_READ.decode(arguments))
    except (ValueError, RecursionError, OverflowError):
        return arguments.strip()


def _plain(text: str | None) -> str:
    return (text or "").strip()


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = np.flatnonzero(a[:length] != b[:length])
    return int(differs[0]) if len(differs) else length
