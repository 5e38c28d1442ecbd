"""Provider APIs by the path of their requests. A new one is one file and one line in a table."""

from __future__ import annotations

from collections.abc import Mapping

from polar.proxy.canonical import Dialect
from polar.proxy.dialects.openai_chat import OpenAIChat

_OPENAI = OpenAIChat()
DIALECTS: dict[str, Dialect] = {"/v1/chat/completions": _OPENAI}
COUNTERS: dict[str, Dialect] = {}
"""paths that only count the tokens of a request"""


def dialect_of(path: str, headers: Mapping[str, str]) -> Dialect:
    """Whose words an answer to this request uses; where the path tells nothing, a header may."""
    return DIALECTS.get(path) or COUNTERS.get(path) or _OPENAI
