"""What clients say in each dialect: one body that all of them read, and what is read off their answers."""

from __future__ import annotations

from typing import Any

import httpx

from running_proxy import OpenSession

PATHS = {
    "openai_chat": "/v1/chat/completions",
    "openai_responses": "/v1/responses",
    "anthropic": "/v1/messages",
    "gemini": "/v1beta/models/policy:generateContent",
}
STREAMED = {"gemini": "/v1beta/models/policy:streamGenerateContent?alt=sse"}
"""paths that say it themselves; the others' bodies do"""
_SCHEMA = {"type": "object", "properties": {"cmd": {"type": "string"}}}
TOOLS: dict[str, list[Any]] = {
    "openai_chat": [{"type": "function", "function": {"name": "bash", "parameters": _SCHEMA}}],
    "openai_responses": [{"type": "function", "name": "bash", "parameters": _SCHEMA}],
    "anthropic": [{"name": "bash", "input_schema": _SCHEMA}],
    "gemini": [{"functionDeclarations": [{"name": "bash", "parameters": _SCHEMA}]}],
}


STOP = "STOP"
SETTINGS: dict[str, Any] = {
    "stop": [STOP],
    "stop_sequences": [STOP],
    "generationConfig": {"stopSequences": [STOP], "thinkingConfig": {"includeThoughts": True}},
}
"""a stop string, which Responses do not have, and thoughts that are shown, in the words of each"""


def body(*turns: str, **fields: Any) -> dict[str, Any]:
    """A conversation of texts; the user's come first."""
    roles = ("user", "assistant")
    messages = [{"role": roles[at % 2], "content": text} for at, text in enumerate(turns)]
    contents = [{"role": ("user", "model")[at % 2], "parts": [{"text": text}]} for at, text in enumerate(turns)]
    return {"model": "policy", "messages": messages, "input": messages, "contents": contents} | fields


def post(
    session: OpenSession, dialect: str, document: dict[str, Any], *, stream: bool = False, **headers: str
) -> httpx.Response:
    """Headers are written with underscores."""
    path = STREAMED.get(dialect, PATHS[dialect]) if stream else PATHS[dialect]
    return session.post(document | {"stream": stream}, path, **headers)


def text_of(dialect: str, answer: dict[str, Any]) -> str:
    """The text of a whole answer."""
    if dialect == "openai_chat":
        return answer["choices"][0]["message"]["content"] or ""
    if dialect == "gemini":
        return "".join(part.get("text", "") for part in answer["candidates"][0]["content"]["parts"])
    if dialect == "anthropic":
        return "".join(block.get("text", "") for block in answer["content"])
    messages = [item for item in answer["output"] if item["type"] == "message"]
    return "".join(part["text"] for message in messages for part in message["content"])


def end_of(dialect: str, answer: dict[str, Any]) -> str:
    """The dialect's word for why a whole answer ended."""
    if dialect == "openai_chat":
        return answer["choices"][0]["finish_reason"]
    if dialect == "gemini":
        return answer["candidates"][0]["finishReason"]
    return answer["stop_reason"] if dialect == "anthropic" else answer["status"]


def thought_of(dialect: str, answer: dict[str, Any]) -> int:
    """How many tokens the usage of a whole answer, or of the event that has it, counts as reasoning."""
    if dialect == "gemini":
        return answer["usageMetadata"].get("thoughtsTokenCount", 0)
    if dialect == "anthropic":
        return answer["usage"]["output_tokens_details"]["thinking_tokens"]
    details = "completion_tokens_details" if dialect == "openai_chat" else "output_tokens_details"
    return answer.get("response", answer)["usage"][details]["reasoning_tokens"]
