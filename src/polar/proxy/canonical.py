"""The one form between dialects and engines: messages, tools and answers in the shape of OpenAI chat.

Content is always text, reasoning stands in `reasoning_content`, arguments of tool calls are JSON text. A message with
images has all of it in `parts` as well. What a dialect cannot bring into this form is refused by name; nothing of a
conversation is dropped silently.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal, Protocol

import msgspec
from pydantic import ValidationError

from polar.config import describe
from polar.protocols import Delta
from polar.requests import Sampling

SSE = "text/event-stream; charset=utf-8"
_SEAL = b"polar:"
Message = dict[str, Any]
Kind = type | tuple[type, ...]
RefusalKind = Literal[
    "bad_request",
    "unsupported",
    "too_large",
    "unauthorized",
    "not_found",
    "context",
    "limit",
    "busy",
    "engine",
    "server",
]


class Refusal(Exception):
    """A request that gets an error in its dialect's own shape."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.message = message


class Ask(msgspec.Struct, kw_only=True):
    """A model call as the harness asked for it. `tool_choice`: auto, none, required, or {"name": a tool's name}.
    `json_schema`: what the answer's text must be. `echo`: what the dialect itself wants to know again when it answers.
    """

    model: str
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = "auto"
    parallel_calls: bool = True
    """False holds only engines that are given messages"""
    json_schema: dict[str, Any] | None = None
    sampling: dict[str, Any] = {}
    stream: bool = False
    usage_in_stream: bool = False
    logprobs: bool = False
    """whether the client wants to have them too"""
    echo: Any = None

    @property
    def offered(self) -> list[dict[str, Any]] | None:
        """The tools that an answer may call."""
        return None if self.tool_choice == "none" else self.tools

    @property
    def images(self) -> bool:
        return any("parts" in message for message in self.messages)

    @property
    def forced(self) -> list[dict[str, Any]]:
        """The tools of which the answer must call one; [] where it need not. Raises Refusal."""
        if self.tool_choice in ("auto", "none"):
            return []
        name = None if self.tool_choice == "required" else self.tool_choice.get("name")
        tools = [tool for tool in self.tools or [] if name in (None, tool["function"]["name"])]
        if not tools:
            none = "there are no tools to choose from" if name is None else f"there is no tool {name!r} to choose"
            raise Refusal("bad_request", f"tool_choice: {none}")
        return tools


class Opening(msgspec.Struct, kw_only=True):
    """What is known of an answer when it starts."""

    id: str
    model: str
    created: int
    prompt_tokens: int = 0
    usage_in_stream: bool = False
    echo: Any = None


class Answer(msgspec.Struct, kw_only=True):
    """A finished answer; `finish_reason`: stop, length or tool_calls; `matched`: the stop string that ended it."""

    opening: Opening
    message: Message
    finish_reason: str
    matched: str | None = None
    completion_tokens: int = 0
    reasoning_tokens: int = 0
    """of the completion's"""
    logprobs: list[tuple[str, float]] | None = None
    """text and logprob of each sampled token, for clients that asked"""


class StreamEncoder(Protocol):
    """Turns an answer into the dialect's events, in order: start, delta…, end; or error at any point."""

    def start(self) -> bytes: ...

    def delta(self, delta: Delta) -> bytes: ...

    def end(self, answer: Answer) -> bytes: ...

    def keep_alive(self) -> bytes:
        """What a stream says while there is nothing to say, also before its start."""
        ...

    def error(self, refusal: Refusal) -> bytes:
        """What ends a stream that cannot go on, also before its start."""
        ...


class Dialect(Protocol):
    """A provider's API as pure functions."""

    name: str
    stream_type: str
    """content type of a streamed answer"""

    def parse(self, body: dict[str, Any], path: str) -> Ask:
        """A request for an answer, or for the count of its tokens. Raises Refusal bad_request or unsupported, naming
        the field."""
        ...

    def whole(self, answer: Answer) -> dict[str, Any]: ...

    def encoder(self, opening: Opening) -> StreamEncoder: ...

    def count(self, tokens: int) -> dict[str, Any]: ...

    def models(self, names: Sequence[str], created: int) -> dict[str, Any]:
        """The list of all models, none of which is on another page."""
        ...

    def model(self, name: str, created: int) -> dict[str, Any]: ...

    def error(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        """HTTP status and body."""
        ...


def field(body: Mapping[str, Any], name: str, kind: Kind, default: Any = None, where: str = "") -> Any:
    """`body[name]`, which may be absent or null. Raises Refusal naming the field."""
    value = body.get(name)
    if value is None:
        return default
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        expected = " or ".join(item.__name__ for item in (kind if isinstance(kind, tuple) else (kind,)))
        raise Refusal("bad_request", f"{where}.{name}: expected {expected}, got {type(value).__name__}".lstrip("."))
    return value


def needed(body: Mapping[str, Any], name: str, kind: Kind, where: str = "") -> Any:
    """`where`: the place of `body`, as the refusal names it."""
    value = field(body, name, kind, where=where)
    if value is None:
        raise Refusal("bad_request", f"{where}.{name}: field is required".lstrip("."))
    return value


def objects(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects; [] where it is absent."""
    items = field(body, name, list, [])
    if not all(isinstance(item, dict) for item in items):
        raise Refusal("bad_request", f"{name}: every item must be an object")
    return items


def picked(body: Mapping[str, Any], names: Mapping[str, tuple[str, Kind]]) -> dict[str, Any]:
    """Sampling settings that are there, under their canonical names: {theirs: (ours, kind)}. Raises Refusal."""
    found = {theirs: field(body, theirs, kind) for theirs, (_, kind) in names.items()}
    given = {theirs: value for theirs, value in found.items() if value is not None}
    settings = {names[theirs][0]: value for theirs, value in given.items()}
    spelt = {names[theirs][0]: theirs for theirs in given}
    try:
        Sampling.model_validate(settings)
    except ValidationError as error:
        told = re.sub(r"(?:(?<=; )|^)\w+", lambda name: spelt.get(name[0], name[0]), describe(error))
        raise Refusal("bad_request", told) from error
    stop = settings.get("stop", [])
    _check_bias(settings.get("logit_bias", {}))
    if "" in ([stop] if isinstance(stop, str) else stop):
        raise Refusal("bad_request", f"{spelt['stop']}: an empty text cannot stop an answer")
    return settings


def _check_bias(bias: Mapping[str, Any]) -> None:
    for token, value in bias.items():
        if not (token.isascii() and token.isdecimal()):
            raise Refusal("bad_request", f"logit_bias: {token!r} is not the id of a token")
        if isinstance(value, bool) or not isinstance(value, int | float) or not -100 <= value <= 100:
            raise Refusal("bad_request", f"logit_bias.{token}: expected a number from -100 to 100")


def refuse(body: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Raises Refusal for a field that asks for something of these: {name: why not}."""
    for name, why in names.items():
        if body.get(name) not in (None, False, [], ""):
            raise Refusal("unsupported", f"{name}: {why}")


Read = Callable[[dict[str, Any], str], str]
"""gives a block's text, or refuses it by the name of its place"""


def joined_text(content: Any, where: str, read: Read) -> str:
    """Text of a string or a list of blocks."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refusal("bad_request", f"{where}: expected a string or a list of blocks")
    return "\n".join(read(block, f"{where}.{at}") for at, block in enumerate(content))


def text_block(block: Mapping[str, Any], where: str) -> str:
    kind = block.get("type")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise Refusal("unsupported", f"{where}: content of type {kind!r} is not supported: this model takes text")
    name = "refusal" if kind == "refusal" else "text"
    if not isinstance(text := block.get(name) or "", str):
        raise Refusal("bad_request", f"{where}.{name}: expected str, got {type(text).__name__}")
    return text


def spoken(
    content: Any,
    where: str,
    image: Callable[[dict[str, Any]], str | None],
    read: Read = text_block,
) -> Message:
    """The `content` of a message that may have images, and its `parts` where it has. `image` gives a block's URL, None
    for a block of another kind."""
    blocks = content if isinstance(content, list) and all(isinstance(block, dict) for block in content) else []
    urls = [image(block) for block in blocks]
    if all(url is None for url in urls):
        return {"content": joined_text(content, where, read)}
    pairs = list(zip(blocks, urls, strict=True))
    texts = [read(block, f"{where}.{at}") for at, (block, url) in enumerate(pairs) if url is None]
    rest = iter(texts)
    parts = [
        {"type": "text", "text": next(rest)} if url is None else {"type": "image_url", "image_url": {"url": url}}
        for _, url in pairs
    ]
    return {"content": "\n".join(texts), "parts": parts}


def data_url(kind: Any, data: Any, where: str) -> str:
    """Raises Refusal for what is no image in base64."""
    if not isinstance(kind, str) or not kind.startswith("image/") or not isinstance(data, str) or not data:
        raise Refusal("unsupported", f"{where}: only images in base64 are taken, this is {kind!r}")
    return f"data:{kind};base64,{data}"


def json_form(form: Mapping[str, Any], where: str, schema: Any) -> dict[str, Any] | None:
    """The schema of a form of answers (text, json_object or json_schema); None for text. Raises Refusal."""
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise Refusal("unsupported", f"{where}: {kind!r} is not supported")
    if not isinstance(schema, dict):
        raise Refusal("bad_request", f"{where}: its schema must be an object")
    return schema


def function_tool(name: str, description: Any, parameters: Any, where: str = "tools") -> dict[str, Any]:
    """Raises Refusal for what is no function's."""
    for what, value, kind in (("description", description, str), ("parameters", parameters, dict)):
        if value is not None and not isinstance(value, kind):
            raise Refusal("bad_request", f"{where}: {what} of {name!r}: expected {kind.__name__}")
    if not name:
        raise Refusal("bad_request", f"{where}: a tool has to have a name")
    function = {"name": name, "description": description or "", "parameters": parameters or {"type": "object"}}
    return {"type": "function", "function": function}


def argument_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """A tool call's arguments for APIs that have them as an object; text that is none stands in one field of it."""
    text = call["function"]["arguments"]
    try:
        value = whole_characters(json.loads(text)) if text else {}
    except (ValueError, RecursionError):
        value = text
    return value if isinstance(value, dict) else {"arguments": value}


def whole_characters(value: Any) -> Any:
    """A JSON value with a question mark for each half of a surrogate pair, which no UTF-8 can hold."""
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
        return value
    except UnicodeEncodeError:
        return json.loads(text.encode(errors="replace"))


def number_too_large(document: Any, where: str = "") -> str | None:
    """The place of a number that is not finite or beyond 64 bits."""
    if isinstance(document, dict):
        places: Iterable[tuple[Any, Any]] = document.items()
    elif isinstance(document, list):
        places = enumerate(document)
    else:
        large = isinstance(document, int) and not -(1 << 63) <= document < 1 << 64
        return where if large or (isinstance(document, float) and not math.isfinite(document)) else None
    inner = (number_too_large(value, f"{where}.{name}".lstrip(".")) for name, value in places)
    return next((place for place in inner if place is not None), None)


def sealed(reasoning: str) -> str:
    """Reasoning in base64, for clients that give back what they cannot read and keep nothing else of it."""
    return base64.b64encode(_SEAL + reasoning.encode(errors="replace")).decode()


def unsealed(text: str) -> str:
    """The reasoning in a seal of ours; "" in any other text. Clients change the alphabet of base64."""
    try:
        data = base64.b64decode(text.replace("-", "+").replace("_", "/") + "=" * (-len(text) % 4))
    except ValueError:
        return ""
    return data.removeprefix(_SEAL).decode(errors="replace") if data.startswith(_SEAL) else ""
