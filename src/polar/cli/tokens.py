"""Tokens for people: decoded one by one where there is a tokenizer, as ids where there is none; a colour says how
likely the policy found what it sampled, and dimming says that a token is not trained."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.text import Text
from tokenizers import Tokenizer

from polar.errors import ConfigError

Decoder = Callable[[Sequence[int]], list[str]]
"""ids [n] to their texts [n]; joined, they are the text of the whole"""

LIKELY, UNSURE, UNLIKELY = -0.1, -1.0, -3.0
"""logprob bounds of the colours: probabilities of about 90 %, 37 % and 5 %"""
_COLOURS = ((LIKELY, "green"), (UNSURE, "yellow"), (UNLIKELY, "dark_orange"))
_NO_LOGPROB, _VERY_UNLIKELY = "magenta", "red"
_UNTRAINED = "dim strike"


def decoder(folder: Path | None) -> Decoder:
    """Special tokens are spelled out; without a folder every id is ⟨id⟩. Raises ConfigError for an unusable one."""
    if folder is None:
        return lambda ids: [f"⟨{token}⟩" for token in ids]
    file = folder / "tokenizer.json" if folder.is_dir() else folder
    if not file.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: give --tokenizer the folder that has it")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the Rust side raises bare Exception for every kind of bad file
        raise ConfigError(f"{file} is not a tokenizer: {error}") from error
    return lambda ids: [_piece(tokenizer, ids[max(0, at - 1) : at + 1]) for at in range(len(ids))]


def _piece(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """What the last of one or two ids adds: some tokenizers put a space between two, and none before the first."""
    before, both = (tokenizer.decode(part, skip_special_tokens=False) for part in (ids[:-1], ids))
    if both.startswith(before):
        return both[len(before) :]
    return tokenizer.decode(ids[-1:], skip_special_tokens=False)


def style(logprob: float | None, trained: bool) -> str:
    colour = _colour(logprob)
    return colour if trained else f"{colour} {_UNTRAINED}"


def _colour(logprob: float | None) -> str:
    if logprob is None or not math.isfinite(logprob):
        return _NO_LOGPROB
    return next((colour for bound, colour in _COLOURS if logprob >= bound), _VERY_UNLIKELY)


def visible(text: str) -> str:
    """Line breaks and control characters shown as signs, so that a token stays one thing on one line."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    return "".join(char if char.isprintable() else f"\\x{ord(char):02x}" for char in shown)


def sampled(ids: Sequence[int], logprobs: Sequence[float | None] | None, trained: bool, decode: Decoder) -> Text:
    """The sampled ids [n] of a turn as one coloured text; logprobs [n], or None where the engine gave none."""
    shown = Text()
    for position, piece in enumerate(decode(ids)):
        logprob = logprobs[position] if logprobs is not None else None
        shown.append(visible(piece), style(logprob, trained))
    return shown


def legend() -> Text:
    parts = [
        (f"logprob ≥ {LIKELY:g}", "green"),
        (f"≥ {UNSURE:g}", "yellow"),
        (f"≥ {UNLIKELY:g}", "dark_orange"),
        ("below", _VERY_UNLIKELY),
        ("none", _NO_LOGPROB),
        ("not trained", _UNTRAINED),
    ]
    return Text("  ").join(Text(text, shade) for text, shade in parts)
