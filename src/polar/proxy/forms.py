"""What of a request an engine can hold: the form of an answer as a grammar. What it cannot is refused by name."""

from __future__ import annotations

from typing import Any

from polar.protocols import Engine, Rendering
from polar.proxy.canonical import Ask, Refusal

NO_IMAGES = "images: this model takes text alone (its engine is given token ids)"
_NO_GRAMMARS = "this engine cannot be held to a form: leave the choice at auto, and ask in words"
_NO_FORM = "tool calls as this model writes them cannot be held to a form: leave the choice at auto"


def grammar_of(ask: Ask, engine: Engine, rendering: Rendering | None) -> dict[str, Any] | None:
    """What an engine that takes ids is told of the form that the answer must have. Raises Refusal."""
    if ask.images and engine.takes_ids:
        raise Refusal("unsupported", NO_IMAGES)
    if not ask.forced and ask.json_schema is None:
        return None
    asked = "tool_choice" if ask.forced else "a JSON schema for the answer"
    if not engine.grammars:
        raise Refusal("unsupported", f"{asked}: {_NO_GRAMMARS}")
    if rendering is None or not engine.takes_ids:
        return None
    grammar = rendering.grammar(None, ask.forced) if ask.forced else rendering.grammar(ask.json_schema, ask.offered)
    if grammar is None:
        raise Refusal("unsupported", f"{asked}: {_NO_FORM}")
    return grammar
