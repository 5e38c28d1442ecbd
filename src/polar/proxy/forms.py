"""What of a request an engine can hold: images as words, the form of an answer as a grammar; else a refusal by name."""

from __future__ import annotations

from typing import Any

from polar.protocols import Engine, Rendering
from polar.proxy.canonical import Ask, Message, Refusal

NO_IMAGES = "images: this model takes text alone (its engine is given token ids)"
NOT_SHOWN = "[image: not shown, since this model takes text alone]"
_NO_GRAMMARS = "this engine cannot be held to a form: leave the choice at auto, and ask in words"
_NO_FORM = "tool calls as this model writes them cannot be held to a form: leave the choice at auto"


def in_words(messages: list[Message]) -> list[Message]:
    """Messages for an engine of ids. An image that came with a tool's result is the model's own doing, and it is told
    so in the image's place; harnesses go on then. Raises Refusal for any other image."""
    made, results = [], False
    for message in messages:
        results = message["role"] == "tool" or (results and message["role"] != "assistant")
        if "parts" in message and not results:
            raise Refusal("unsupported", NO_IMAGES)
        if "parts" in message:
            texts = [part.get("text", NOT_SHOWN) for part in message["parts"]]
            message = {name: value for name, value in message.items() if name != "parts"} | {
                "content": "\n".join(texts)
            }
        made.append(message)
    return made


def grammar_of(ask: Ask, engine: Engine, rendering: Rendering | None) -> dict[str, Any] | None:
    """What an engine that takes ids is told of the form that the answer must have. Raises Refusal."""
    if ask.logprobs and rendering is None:
        raise Refusal("unsupported", "logprobs: the tokenizer of this model is not known here")
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
