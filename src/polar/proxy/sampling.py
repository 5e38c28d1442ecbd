"""How a call is sampled: what the task forces wins over what the harness asks, and every value used is recorded."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

DEFAULTS: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1}
"""Always said, since engines take defaults of their own from a model's files."""
LONGEST = 32_768
"""where neither the harness nor the task nor the engine bounds an answer"""
_PENALTIES = {"frequency_penalty": 0, "presence_penalty": 0, "repetition_penalty": 1}
_FORMS = (
    *("json_schema", "regex", "ebnf", "structural_tag", "structured_outputs", "response_format"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("logit_bias", "allowed_token_ids", "bad_words", "min_tokens", "min_new_tokens"),
)


def effective(
    asked: Mapping[str, Any],
    forced: Mapping[str, Any],
    *,
    names: tuple[int, int, int],
    room: int | None,
    stop_ids: Iterable[int],
) -> dict[str, Any]:
    """Sampling values of one call. `names`: session's index in its group, attempt, call number; `room`: how many tokens
    context and limits leave. A seed is a base, whoever gives it: the sessions of a group never sample alike."""
    values = DEFAULTS | dict(asked) | dict(forced)
    bounds = [asked.get("max_tokens"), forced.get("max_tokens"), room]
    values["max_tokens"] = min((bound for bound in bounds if bound is not None), default=LONGEST)
    if values["top_k"] <= 0:
        values["top_k"] = DEFAULTS["top_k"]
    if isinstance(values.get("stop"), str):
        values["stop"] = [values["stop"]]
    if "seed" in values:
        values["seed"] = call_seed(values["seed"], names)
    if not values.get("ignore_eos"):
        ends = list(dict.fromkeys([*values.get("stop_token_ids", []), *stop_ids]))
        values |= {"stop_token_ids": ends} if ends else {}
    return values


def reshapes(values: Mapping[str, Any]) -> bool:
    """Whether these settings sample from another distribution than the model's at a temperature, whose logprobs no
    trainer computes again. (top_p, top_k and min_p leave the logprobs of what they leave.)"""
    moved = any(values.get(name) not in (None, neutral) for name, neutral in _PENALTIES.items())
    return moved or any(values.get(name) for name in _FORMS)


def call_seed(base: int, names: tuple[int, int, int]) -> int:
    """31 bits that hang on the base, session index, attempt and call number alone."""
    text = ":".join(map(str, (base, *names))).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little") & 0x7FFFFFFF
