"""Provider APIs by the method and path of a request. A new one is one file, its name here, and its rows below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from polar.proxy.canonical import Dialect
from polar.proxy.dialects.anthropic import Anthropic
from polar.proxy.dialects.gemini import Gemini
from polar.proxy.dialects.openai_chat import OpenAIChat
from polar.proxy.dialects.openai_responses import OpenAIResponses

Action = Literal["answer", "count", "models", "model"]

_CHAT, _RESPONSES, _ANTHROPIC = OpenAIChat(), OpenAIResponses(), Anthropic()
_GEMINI, _GEMINI_ARRAY = Gemini(sse=True), Gemini(sse=False)
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (_CHAT, _RESPONSES, _ANTHROPIC, _GEMINI)}
_ROWS: list[tuple[str, str, Dialect | None, Action]] = [
    ("POST", "/v1/chat/completions", _CHAT, "answer"),
    ("POST", "/v1/responses", _RESPONSES, "answer"),
    ("POST", "/v1/responses/input_tokens", _RESPONSES, "count"),
    ("POST", "/v1/messages", _ANTHROPIC, "answer"),
    ("POST", "/v1/messages/count_tokens", _ANTHROPIC, "count"),
    ("POST", "/v1(?:alpha|beta)?/models/.+:(?:generateContent|streamGenerateContent)", _GEMINI, "answer"),
    ("POST", "/v1(?:alpha|beta)?/models/.+:countTokens", _GEMINI, "count"),
    ("GET", "/v1(?:alpha|beta)/models", _GEMINI, "models"),
    ("GET", "/v1(?:alpha|beta)/models/.+", _GEMINI, "model"),
    ("GET", "/v1/models", None, "models"),
    ("GET", "/v1/models/.+", None, "model"),
]
"""method, path, dialect (None: several share the path), action"""
_STARTS: dict[str, Dialect] = {"/v1/messages": _ANTHROPIC, "/v1alpha/": _GEMINI, "/v1beta/": _GEMINI}
_HEADERS: dict[str, Dialect] = {"anthropic-version": _ANTHROPIC, "x-goog-api-key": _GEMINI}


class Route(NamedTuple):
    """`action` None: there is no such route, and `dialect` is the one to say so in."""

    dialect: Dialect
    action: Action | None


def route_of(method: str, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Route:
    rows = [row for row in _ROWS if re.fullmatch(row[1], path)]
    action = next((action for at, _, _, action in rows if at == method), None)
    dialect = next((dialect for _, _, dialect, _ in rows if dialect), None) or _guessed(path, headers)
    if dialect is _GEMINI and query.get("alt") != "sse":
        return Route(_GEMINI_ARRAY, action)
    return Route(dialect, action)


def _guessed(path: str, headers: Mapping[str, str]) -> Dialect:
    by_path = [dialect for start, dialect in _STARTS.items() if path.startswith(start)]
    by_header = [dialect for name, dialect in _HEADERS.items() if name in headers]
    return next(iter([*by_path, *by_header]), _CHAT)
