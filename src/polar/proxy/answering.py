"""What an engine has sampled as the answer that a client gets. A stream says what the whole answer says: nothing that
was relayed is ever taken back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from polar.errors import EngineFault
from polar.protocols import Delta, Piece, Rendering
from polar.proxy.canonical import Message

_PADDING = 4096
"""a model's table of tokens is longer than its tokenizer's list, by some hundred"""
_ROUNDING = 0.01
_TEXTS: dict[Literal["reasoning", "text"], str] = {"reasoning": "reasoning_content", "text": "content"}
"""kinds of deltas, in order, and where a message has their text"""


def message_of(
    last: Piece,
    rendering: Rendering | None,
    ids: np.ndarray,
    tools: list[dict[str, Any]] | None,
    stops: Sequence[str],
    relayed: Sequence[Delta],
) -> Message:
    """`tools`: those that were offered; `relayed`: all that clients have had."""
    if last.message is not None:
        message = dict(last.message)
    elif rendering is not None:
        message = rendering.parse(ids, tools)
        for name in message.keys() & set(_TEXTS.values()):
            message[name] = _before_stop(message[name], stops)
    else:
        raise EngineFault("the engine's answer has no message", name="engine_error")
    for kind, name in _TEXTS.items():
        if not message.get(name, "").startswith(told := _told(relayed, kind)):
            message[name] = told
    return message


def check_tokens(piece: Piece, rendering: Rendering | None) -> None:
    """Raises EngineFault `engine_lies` for what no model can have sampled, and no trainer could take."""
    if not len(piece.ids):
        return
    if rendering is not None and (most := int(piece.ids.max())) >= rendering.vocabulary + _PADDING:
        there = f"of {rendering.vocabulary} that there are"
        raise EngineFault(f"the engine gives the token id {most}, {there}", name="engine_lies")
    if piece.logprobs is not None and (piece.logprobs > _ROUNDING).any():
        raise EngineFault(f"the engine gives a logprob above 0: {np.nanmax(piece.logprobs):.3g}", name="engine_lies")


def named_calls(message: Message, answer: str) -> Message:
    """With an id for each call that has none."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    named = [{**call, "id": call.get("id") or f"call_{answer}{at:02d}"} for at, call in enumerate(calls)]
    return {**message, "tool_calls": named}


def remainder(message: Message, relayed: Sequence[Delta]) -> list[Delta]:
    """What of the message was held back."""
    rests = {kind: message.get(name, "")[len(_told(relayed, kind)) :] for kind, name in _TEXTS.items()}
    deltas = [Delta(kind=kind, text=rest) for kind, rest in rests.items() if rest]
    return deltas + [Delta(kind="tool_call", call=call) for call in message.get("tool_calls", [])]


def thinking_tokens(message: Message, last: Piece, rendering: Rendering | None, ids: np.ndarray) -> int:
    """How many of the tokens are reasoning."""
    if rendering is None or last.message is not None or not message.get("reasoning_content"):
        return last.usage.get("reasoning_tokens", 0)
    return rendering.thinking(ids)


def logprobs_of(rendering: Rendering, ids: np.ndarray, logprobs: Sequence[float]) -> list[tuple[str, float]]:
    """Text and logprob of each token."""
    texts = (rendering.decode(ids[at : at + 1]) for at in range(len(ids)))
    return list(zip(texts, logprobs, strict=True))


def _told(relayed: Sequence[Delta], kind: str) -> str:
    return "".join(delta.text for delta in relayed if delta.kind == kind)


def _before_stop(content: str, stops: Sequence[str]) -> str:
    found = [at for stop in stops if stop and (at := content.find(stop)) >= 0]
    return content[: min(found)] if found else content
