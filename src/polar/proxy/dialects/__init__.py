"""Provider APIs by the path of their requests. A new one is one file and its lines in the tables."""

from __future__ import annotations

from collections.abc import Mapping

from polar.proxy.canonical import Dialect
from polar.proxy.dialects.anthropic import Anthropic
from polar.proxy.dialects.openai_chat import OpenAIChat

_OPENAI, _ANTHROPIC = OpenAIChat(), Anthropic()
DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": _OPENAI, "/v1/messages": _ANTHROPIC}
COUNTERS: dict[str, Dialect] = {"/v1/messages/count_tokens": _ANTHROPIC}
"""paths that only count the tokens of a request"""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Whose words the answer to this request uses; where the path does not tell, a header may."""
    by_header = _ANTHROPIC if "anthropic-version" in headers else _OPENAI
    return DIALECTS.get(path) or COUNTERS.get(path) or by_header
