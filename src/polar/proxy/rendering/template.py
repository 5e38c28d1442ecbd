"""Any model's own chat template, over its own tokenizer: messages to ids, and ids that continue a conversation.

A bridge is exact or it is refused: it is what the template writes behind the same turn, and nothing of the sequence is
encoded again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from polar.protocols import AnswerReader
from polar.proxy.rendering.bridges import STAND_IN, Bridges
from polar.proxy.rendering.chat_template import QUESTION, ChatTemplate, Message, Tools
from polar.proxy.rendering.folder import TokenizerFolder
from polar.proxy.rendering.formats import format_of
from polar.proxy.rendering.grammars import grammar
from polar.proxy.rendering.tokens import Reader, Tokens, thinking_ids, without_end


class TemplateRendering:
    """Implements `polar.protocols.Rendering`. Safe for several threads."""

    def __init__(self, folder: TokenizerFolder) -> None:
        self.name = folder.name
        self.sha256 = hashlib.sha256(folder.tokenizer_json + folder.template.encode()).hexdigest()
        self._tokens = Tokens(folder.tokenizer_json)
        self.vocabulary = self._tokens.vocabulary
        self._template = ChatTemplate(folder.template, folder.special_tokens)
        self._format = format_of(folder.template, self._tokens.added)
        self._reasoning_open = self._format.opens_reasoning(self._template.text([QUESTION], None, prompt=True))
        self._end_of_thinking = self._tokens.number(self._format.end_of_thinking)
        self.stop_ids = self._stop_ids(folder)
        markup = {self._tokens.number(text) for text in self._format.markers}
        self._ends = self._tokens.special - markup
        self._bridges = Bridges(self._template, self._tokens, self.stop_ids)

    @property
    def notes(self) -> list[str]:
        """What somebody who trains with this template should know."""
        bridges = self._bridges
        unstable = ", ".join(sorted(bridges.unstable[False] | bridges.unstable[True]))
        told = {
            "it is not prefix-stable: every turn is rendered again": not bridges.any,
            f"it is not prefix-stable for messages of: {unstable}; they are rendered again": bridges.any and unstable,
            "it does not tell the model which tools it has": not self._template.writes_tools(),
            "it leaves tool calls out of the history": not self._template.writes_calls,
        }
        return [note for note, holds in told.items() if holds]

    def render(self, messages: list[Message], tools: Tools) -> np.ndarray:
        """Raises TaskFault `template` when the template refuses the conversation."""
        return self._tokens.encode(self._template.text(messages, tools, prompt=True))

    def bridge(
        self, sequence: np.ndarray, new_messages: list[Message], tools: Tools, *, sampled: int
    ) -> np.ndarray | None:
        return self._bridges.behind(sequence, sampled, new_messages, bool(tools))

    def parse(self, ids: np.ndarray, tools: Tools) -> Message:
        text = self.decode(without_end(ids, self._ends))
        return self._format.parse(text, tools, reasoning_open=self._reasoning_open)

    def reader(self, tools: Tools, stops: Sequence[str]) -> AnswerReader:
        scanner = self._format.scanner(tools, reasoning_open=self._reasoning_open, stops=stops)
        return Reader(self._tokens, self._ends, scanner)

    def thinking(self, ids: np.ndarray) -> int:
        """By the token that ends it, where there is one."""
        if self._end_of_thinking is None:
            return thinking_ids(lambda start: self.parse(start, None), ids)
        ends = np.flatnonzero(ids == self._end_of_thinking)
        return int(ends[0]) + 1 if len(ends) else len(ids)

    def grammar(self, schema: dict[str, Any] | None, tools: Tools) -> dict[str, Any] | None:
        return grammar(schema, tools, self._format.call_form, reasoning_open=self._reasoning_open)

    def least_tokens(self, texts: Sequence[str], enough: int) -> int:
        return self._tokens.least(texts, enough)

    def decode(self, ids: np.ndarray) -> str:
        return self._tokens.decode(ids)

    def _stop_ids(self, folder: TokenizerFolder) -> tuple[int, ...]:
        """What the template ends a conversation with, and what the model's files and its format name."""
        turn = [QUESTION, {"role": "assistant", "content": STAND_IN}]
        written = self._tokens.encode(self._template.text(turn, None, prompt=False).partition(STAND_IN)[2])
        first = [int(number) for number in written[:1] if int(number) in self._tokens.special]
        named = [self._tokens.number(text) for text in (folder.eos, *self._format.ends)]
        known = [number for number in (*first, named[0], *folder.eos_ids, *named[1:]) if number is not None]
        return tuple(dict.fromkeys(known))
