"""What a client is told that its prompt has, before the call and behind it, is what the engine got."""

from __future__ import annotations

from typing import Any

import pytest

from dialects import PATHS, TOOLS, body, post
from peers.engine import ScriptedEngine
from running_proxy import OpenSession, RunningProxy

COUNTS = {
    "openai_responses": ("/v1/responses/input_tokens", "input_tokens"),
    "anthropic": ("/v1/messages/count_tokens", "input_tokens"),
    "gemini": ("/v1beta/models/policy:countTokens", "totalTokens"),
}
PROMPTS = {
    "openai_chat": ("usage", "prompt_tokens"),
    "openai_responses": ("usage", "input_tokens"),
    "anthropic": ("usage", "input_tokens"),
    "gemini": ("usageMetadata", "promptTokenCount"),
}
HEAD: dict[str, dict[str, Any]] = {
    "openai_chat": {},
    "openai_responses": {"instructions": "be brief"},
    "anthropic": {"system": [{"type": "text", "text": "be brief"}]},
    "gemini": {"systemInstruction": {"parts": [{"text": "be brief"}]}},
}


def counted(session: OpenSession, dialect: str, document: dict[str, Any]) -> int:
    path, field = COUNTS[dialect]
    asked = {"generateContentRequest": document | {"model": "models/policy"}} if dialect == "gemini" else document
    return session.post(asked, path).json()[field]


@pytest.mark.parametrize("dialect", PATHS)
def test_the_count_is_what_the_engine_gets(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    """Also where a call goes on from an answer whose thinking the client leaves out, and the context keeps it."""
    engine.script({"text": "<think>so it is, and it is long</think>one"})
    session = proxy.open()
    for turns in (["hi"], ["hi", "one", "go on"]):
        document = body(*turns, max_tokens=900, tools=TOOLS[dialect], **HEAD[dialect])
        before = counted(session, dialect, document) if dialect in COUNTS else None
        name, field = PROMPTS[dialect]
        told = post(session, dialect, document).json()[name][field]
        assert told == len(engine.requests[-1]["input_ids"]) == session.log.calls[-1].prompt_length
        assert before in (told, None)
    assert session.log.calls[-1].prompt.source == "continued"
    assert len(engine.requests) == 2
