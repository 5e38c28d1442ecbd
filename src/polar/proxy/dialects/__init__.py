"""Provider APIs by the method and path of a request. A new one is one file, its name here, and its rows below."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, NamedTuple

from polar.proxy.canonical import Dialect
from polar.proxy.dialects.anthropic import Anthropic
from polar.proxy.dialects.openai_chat import OpenAIChat

Action = Literal["answer", "count", "models", "model"]

_CHAT, _ANTHROPIC = OpenAIChat(), Anthropic()
DIALECTS: dict[str, Dialect] = {dialect.name: dialect for dialect in (_CHAT, _ANTHROPIC)}
_ROWS: list[tuple[str, str, Dialect | None, Action]] = [
    ("POST", "/v1/chat/completions", _CHAT, "answer"),
    ("POST", "/v1/messages", _ANTHROPIC, "answer"),
    ("POST", "/v1/messages/count_tokens", _ANTHROPIC, "count"),
    ("GET", "/v1/models", None, "models"),
    ("GET", "/v1/models/.+", None, "model"),
]
"""method, path, dialect (None: where several share the path, the headers tell), action"""


class Route(NamedTuple):
    """`action` None: there is no such route, and `dialect` is the one to say so in."""

    dialect: Dialect
    action: Action | None


def route_of(method: str, path: str, headers: Mapping[str, str]) -> Route:
    action: Action | None = None
    dialect: Dialect | None = None
    for at, pattern, whose, does in _ROWS:
        if re.fullmatch(pattern, path):
            dialect = whose
            if at == method:
                action = does
                break
    return Route(dialect or _by_headers(headers), action)


def _by_headers(headers: Mapping[str, str]) -> Dialect:
    return _ANTHROPIC if "anthropic-version" in headers else _CHAT
