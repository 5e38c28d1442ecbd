"""A tokenizer's folder as a tokenizer: text to ids, ids to text, whole or while they come."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from polar.protocols import Delta
from polar.proxy.rendering.parsing import Scanner
from polar.records import IDS

_SLICE = 1 << 16
"""characters"""


class Tokens:
    """Safe for several threads. `special`: ids that are never text; `vocabulary`: they are below it."""

    def __init__(self, tokenizer_json: bytes) -> None:
        self.tokenizer: Tokenizer = Tokenizer.from_str(tokenizer_json.decode())
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = self.tokenizer.get_added_tokens_decoder()
        self.special = frozenset(number for number, token in added.items() if token.special)
        self.added = {token.content: number for number, token in added.items()}
        entries = self.tokenizer.get_vocab()
        self.vocabulary = max(entries.values()) + 1
        self._longest = max(map(len, entries)) if self._has_every_byte() else None

    def _has_every_byte(self) -> bool:
        """Whether no text is left out or becomes one unknown token, however long it is."""
        model = self.tokenizer.model
        single = (f"<0x{byte:02X}>" for byte in range(256)) if getattr(model, "byte_fallback", False) else None
        known = all(self.number(entry) is not None for entry in single or ByteLevel.alphabet())
        return isinstance(model, BPE) and known

    def encode(self, text: str) -> np.ndarray:
        # As a batch, because only that lets other threads go on meanwhile (case 38).
        [encoding] = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return np.asarray(encoding.ids, IDS)

    def least(self, texts: Sequence[str], enough: int) -> int:
        """A lower bound of their tokens, told once it is above `enough`. A cut in the middle of a word changes some
        tokens, by far not half of them."""
        if self._longest and (least := sum(map(len, texts)) // self._longest) > enough:
            return least
        count = 0
        for text in texts:
            for start in range(0, len(text), _SLICE):
                count += len(self.encode(text[start : start + _SLICE]))
                if count > 2 * enough + 1:
                    return count // 2
        return count // 2

    def decode(self, ids: np.ndarray) -> str:
        return self.tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def number(self, text: str) -> int | None:
        return self.tokenizer.token_to_id(text)


class Reader:
    """Ids to text while they come. Ids of `ends`, which may prove to be the end of the turn, are held back, as the
    whole answer leaves them out; so is a character whose bytes are not all there yet."""

    def __init__(self, tokens: Tokens, ends: Collection[int], scanner: Scanner) -> None:
        self._tokenizer = tokens.tokenizer
        self._ends = ends
        self._scanner = scanner
        self._stream = DecodeStream(skip_special_tokens=False)
        self._held: list[int] = []

    def feed(self, ids: np.ndarray) -> list[Delta]:
        text = ""
        for number in ids.tolist():
            self._held.append(number)
            if number not in self._ends:
                text += "".join(self._stream.step(self._tokenizer, held) or "" for held in self._held)
                self._held = []
        return self._scanner.feed(text) if text else []


def thinking_ids(parse: Callable[[np.ndarray], dict[str, Any]], ids: np.ndarray) -> int:
    """How many ids it takes until all of the reasoning is there: a few looks at starts of the answer."""
    reasoning = parse(ids).get("reasoning_content")
    return bisect_left(
        range(len(ids)), True, key=lambda count: parse(ids[:count]).get("reasoning_content") == reasoning
    )


def without_end(ids: np.ndarray, ends: Collection[int]) -> np.ndarray:
    end = len(ids)
    while end and int(ids[end - 1]) in ends:
        end -= 1
    return ids[:end]
