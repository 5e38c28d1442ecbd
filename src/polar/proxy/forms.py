"""What of a request an engine can hold: so much text, images as words, the form of an answer as a grammar; else a
refusal by name."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from polar.protocols import Engine, Rendering
from polar.proxy.canonical import Ask, Message, Refusal

NO_IMAGES = "images: this model takes text alone (its engine is given token ids)"
NOT_SHOWN = "[image: not shown, since this model takes text alone]"
_DENSE = 8
"""characters a token that hardly any text reaches: what is shorter is not looked at"""
_THOUGHTS = 16
"""contexts that the thoughts of a history may fill, where a template leaves them out"""
_COUNTED = 1 << 20
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


def check_count(ask: Ask, size: int, rendering: Rendering, context: int | None) -> None:
    """As `check_length`, for a prompt whose tokens are only counted: it may be longer than the context."""
    check_length(ask, size, rendering, max(context or 0, _COUNTED), "that are counted")


def check_length(
    ask: Ask, size: int, rendering: Rendering | None, context: int | None, bound: str = "maximum context length"
) -> None:
    """Refuses a text that is much longer than the context before all of it becomes tokens, which would take a minute
    and gigabytes. `size`: bytes of the request, which bound its characters."""
    if rendering is None or context is None or size <= _DENSE * context:
        return
    if len(ask.messages) > context:  # each has at least the token that begins it
        raise _too_long(len(ask.messages), context, bound)
    thoughts = [message.get("reasoning_content", "") for message in ask.messages]
    # One thought was sampled within the context; of all of them a template may write the last alone.
    written = [*_written(ask.messages), *_strings(ask.tools), max(thoughts, key=len)]
    for texts, most in ((written, context), (thoughts, _THOUGHTS * context)):
        if sum(map(len, texts)) > _DENSE * most and (least := rendering.least_tokens(texts, most)) > most:
            raise _too_long(least, context, bound)


def _too_long(least: int, context: int, bound: str) -> Refusal:
    return Refusal("context", f"prompt is too long: at least {least} tokens > {context} {bound}")


def _written(messages: list[Message]) -> Iterator[str]:
    """What every template writes of messages."""
    for message in messages:
        yield message["content"]
        for call in message.get("tool_calls", []):
            yield from (call["function"]["name"], call["function"]["arguments"])


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for inner in value:
            yield from _strings(inner)
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield name
            yield from _strings(inner)


def check_bias(ask: Ask, rendering: Rendering | None) -> None:
    """Refuses ids that no token has."""
    if rendering is None:
        return
    beyond = [token for token in ask.sampling.get("logit_bias", {}) if int(token[:20]) >= rendering.vocabulary]
    if beyond:
        raise Refusal("bad_request", f"logit_bias.{beyond[0]}: the ids of tokens are below {rendering.vocabulary}")


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
