"""Any model's own chat template, over its own tokenizer: messages to ids, and ids that continue a conversation.

A bridge is exact or it is refused: what it appends is what the template writes behind an assistant turn, cut off by a
stand-in for that turn's text, never by searching for the id that ends it. Nothing of the sequence is encoded again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import jinja2
import numpy as np
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from polar.errors import TaskFault
from polar.protocols import Delta
from polar.proxy.rendering.folder import TokenizerFolder
from polar.proxy.rendering.parsing import THINK, Scanner, arguments_of, parse_text
from polar.records import IDS

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

STAND_IN = "stand-in turn 4c1f"
_QUESTION = {"role": "user", "content": "question"}
_ANSWER = {"role": "assistant", "content": STAND_IN}
_TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {"type": "object"}}}


class TemplateRendering:
    """Implements `polar.protocols.Rendering`. Safe for several threads."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self.name = folder.name
        self.sha256 = hashlib.sha256(folder.tokenizer_json + folder.template.encode()).hexdigest()
        self._tokenizer: Tokenizer = Tokenizer.from_str(folder.tokenizer_json.decode())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._special = frozenset(
            number for number, token in self._tokenizer.get_added_tokens_decoder().items() if token.special
        )
        self._names = folder.special_tokens
        self._template = _environment().from_string(folder.template)
        opening = self._text([_QUESTION], None, prompt=True)
        self._reasoning_open = opening.rstrip().endswith(THINK)
        closing = self._closing()
        self._closing_ids = self._encode(closing or "")
        self.bridges = closing is not None
        """False: the template is not prefix-stable, and every turn is rendered again"""
        ends = [end for end in (self._tokenizer.token_to_id(folder.eos), *folder.eos_ids) if end is not None]
        if len(self._closing_ids) and int(self._closing_ids[0]) in self._special:
            ends.insert(0, int(self._closing_ids[0]))
        self.stop_ids = tuple(dict.fromkeys(ends))

    def render(self, messages: list[Message], tools: Tools) -> np.ndarray:
        """Raises TaskFault `template` when the template refuses the conversation."""
        return self._encode(self._text(messages, tools, prompt=True))

    def bridge(self, sequence: np.ndarray, new_messages: list[Message], tools: Tools) -> np.ndarray | None:
        """What closes the turn at the end of `sequence`, as far as it is not closed yet, then the new messages."""
        if not self.bridges:
            return None
        tail = self._behind_stand_in(new_messages, bool(tools))
        if tail is None:
            return None
        ids = self._encode(tail)
        closing = self._closing_ids
        if not np.array_equal(ids[: len(closing)], closing):
            return None
        return ids[_overlap(sequence, closing) :]

    def parse(self, ids: np.ndarray, tools: Tools) -> Message:
        text = self.decode(self._without_end(ids))
        return parse_text(text, tools=bool(tools), reasoning_open=self._reasoning_open)

    def reader(self, tools: Tools, stops: Sequence[str]) -> Reader:
        scanner = Scanner(tools=bool(tools), reasoning_open=self._reasoning_open, stops=stops)
        return Reader(self._tokenizer, self._special, scanner)

    def decode(self, ids: np.ndarray) -> str:
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _without_end(self, ids: np.ndarray) -> np.ndarray:
        end = len(ids)
        while end and int(ids[end - 1]) in self._special:
            end -= 1
        return ids[:end]

    def _encode(self, text: str) -> np.ndarray:
        return np.asarray(self._tokenizer.encode(text, add_special_tokens=False).ids, IDS)

    def _text(self, messages: list[Message], tools: Tools, *, prompt: bool) -> str:
        readable = [_for_template(message) for message in messages]
        try:
            return self._fill(readable, tools, prompt)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
            tamed = [_with_tame_arguments(message) for message in readable]
            if tamed == readable:
                raise TaskFault(f"the chat template refuses this conversation: {error}", name="template") from error
        try:
            return self._fill(tamed, tools, prompt)
        except (jinja2.TemplateError, TypeError, ValueError, AttributeError) as error:
            raise TaskFault(f"the chat template refuses this conversation: {error}", name="template") from error

    def _fill(self, messages: list[Message], tools: Tools, prompt: bool) -> str:
        return self._template.render(
            messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self._names
        )

    def _closing(self) -> str | None:
        """What the template writes behind an assistant's text; None when that hangs on what was said before."""
        endings = {self._ending([_QUESTION]), self._ending([_QUESTION, {**_ANSWER, "content": "answer"}, _QUESTION])}
        if len(endings) != 1 or self._behind_stand_in([_QUESTION], False) is None:
            return None
        return endings.pop() or None

    def _ending(self, before: list[Message]) -> str:
        return self._text([*before, _ANSWER], None, prompt=False).partition(STAND_IN)[2]

    def _behind_stand_in(self, new: list[Message], tools: bool) -> str | None:
        """The text behind the stand-in turn with `new` after it; None when the new messages change what is before it,
        or the template does not take them there."""
        offered = [_TOOL] if tools else None
        try:
            before = self._text([_QUESTION], offered, prompt=True)
            whole = self._text([_QUESTION, _ANSWER, *new], offered, prompt=True)
        except TaskFault:
            return None
        head, found, tail = whole.partition(STAND_IN)
        # A generation prompt may go on behind the head of the turn, e.g. open the reasoning.
        return tail if found and before.startswith(head.rstrip()) else None


class Reader:
    """Ids to text while they come. Ids that may prove to be the end of the turn are held back, as `parse` leaves them
    out; so is a character whose bytes are not all there yet."""

    def __init__(self, tokenizer: Tokenizer, special: frozenset[int], scanner: Scanner) -> None:
        self._tokenizer = tokenizer
        self._special = special
        self._scanner = scanner
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def feed(self, ids: np.ndarray) -> list[Delta]:
        text = ""
        for number in ids.tolist():
            self._held.append(number)
            if number not in self._special:
                text += "".join(self._stream.step(self._tokenizer, held) or "" for held in self._held)
                self._held = []
        return self._scanner.feed(text) if text else []


def _overlap(sequence: np.ndarray, closing: np.ndarray) -> int:
    """How many ids of `closing` the sequence ends with already: an end of turn is never doubled (case 12)."""
    for length in range(min(len(closing), len(sequence)), 0, -1):
        if np.array_equal(sequence[-length:], closing[:length]):
            return length
    return 0


def _for_template(message: Message) -> Message:
    """Templates test content with `in` and walk arguments as a map (case 9)."""
    readable = {**message, "content": message.get("content") or ""}
    if calls := message.get("tool_calls"):
        readable["tool_calls"] = [{**call, "function": _readable(call["function"])} for call in calls]
    return readable


def _readable(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or ""
    return {**function, "arguments": arguments_of(arguments) if isinstance(arguments, str) else arguments}


def _with_tame_arguments(message: Message) -> Message:
    """Arguments that are no map, as a map: for templates that take nothing else."""
    calls = [
        call
        if isinstance(call["function"]["arguments"], dict)
        else {**call, "function": {**call["function"], "arguments": {"arguments": call["function"]["arguments"]}}}
        for call in message.get("tool_calls", [])
    ]
    return {**message, "tool_calls": calls} if calls else message


class _GenerationTag(Extension):
    """Some templates mark what the assistant says with {% generation %}; here it is plain text."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> jinja2.Environment:
    """As the authors of chat templates expect it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
