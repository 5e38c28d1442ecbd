"""Case 29: an assistant of tool calls without content, results of tools, and an empty list of calls are no error in any
dialect, for any engine: each becomes the same messages, and the engine gets nothing that it would refuse."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from dialects import TOOLS, post
from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from polar.proxy.dialects import DIALECTS
from polar.proxy.engines import ENGINES
from running_proxy import running_proxy

ARGUMENTS = json.dumps({"cmd": "ls"})
USER, HELLO = {"role": "user", "content": "go"}, {"role": "assistant", "content": "hello"}


def call(number: int) -> dict[str, Any]:
    return {"id": f"c{number}", "type": "function", "function": {"name": "bash", "arguments": ARGUMENTS}}


def result(number: int, text: str) -> dict[str, Any]:
    return {"role": "tool", "content": text, "tool_call_id": f"c{number}"}


CANONICAL: dict[str, list[dict[str, Any]]] = {
    "no content": [USER, {"role": "assistant", "content": "", "tool_calls": [call(1)]}, result(1, "a")],
    "results": [
        USER,
        {"role": "assistant", "content": "look", "tool_calls": [call(1), call(2)]},
        *(result(1, "a"), result(2, ""), {"role": "user", "content": "and?"}),
    ],
    "no calls": [USER, HELLO, {"role": "user", "content": "on"}],
}
CHAT: dict[str, Any] = {
    "no content": [USER, {"role": "assistant", "tool_calls": [call(1)]}, result(1, "a")],
    "results": [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "look"}], "tool_calls": [call(1), call(2)]},
        *(result(1, "a"), {"role": "tool", "content": None, "tool_call_id": "c2"}, {"role": "user", "content": "and?"}),
    ],
    "no calls": [USER, HELLO | {"tool_calls": []}, {"role": "user", "content": "on"}],
}


def function_call(number: int) -> dict[str, Any]:
    return {"type": "function_call", "call_id": f"c{number}", "name": "bash", "arguments": ARGUMENTS}


def function_output(number: int, text: Any) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": f"c{number}", "output": text}


RESPONSES: dict[str, Any] = {
    "no content": [USER, function_call(1), function_output(1, "a")],
    "results": [
        *(USER, {"role": "assistant", "content": [{"type": "output_text", "text": "look"}]}, function_call(1)),
        *(function_call(2), function_output(1, [{"type": "input_text", "text": "a"}]), function_output(2, "")),
        {"role": "user", "content": "and?"},
    ],
    "no calls": [USER, HELLO, {"role": "user", "content": "on"}],
}


def tool_use(number: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": f"c{number}", "name": "bash", "input": {"cmd": "ls"}}


def tool_result(number: int, **fields: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": f"c{number}"} | fields


ANTHROPIC: dict[str, Any] = {
    "no content": [
        USER,
        {"role": "assistant", "content": [tool_use(1)]},
        {"role": "user", "content": [tool_result(1, content="a")]},
    ],
    "results": [
        USER,
        {"role": "assistant", "content": [{"type": "text", "text": "look"}, tool_use(1), tool_use(2)]},
        {
            "role": "user",
            "content": [tool_result(1, content="a"), tool_result(2), {"type": "text", "text": "and?"}],
        },
    ],
    "no calls": [USER, HELLO, {"role": "user", "content": "on"}],
}


def said(role: str, *parts: Any) -> dict[str, Any]:
    return {"role": role, "parts": [{"text": part} if isinstance(part, str) else part for part in parts]}


def asked(number: int, **fields: Any) -> dict[str, Any]:
    return {"functionCall": {"name": "bash", "args": {"cmd": "ls"}, "id": f"c{number}"}} | fields


def given(number: int, text: str) -> dict[str, Any]:
    return {"functionResponse": {"id": f"c{number}", "name": "bash", "response": {"output": text}}}


GEMINI: dict[str, Any] = {
    "no content": [said("user", "go"), said("model", asked(1)), said("function", given(1, "a"))],
    "results": [
        *(said("user", "go"), said("model", "look", asked(1, thoughtSignature="AA"), asked(2))),
        said("user", given(1, "a"), given(2, ""), "and?"),
    ],
    "no calls": [said("user", "go"), said("model", "hello"), said("model"), said("user", "on")],
}
BODIES = {
    "openai_chat": ("messages", CHAT),
    "openai_responses": ("input", RESPONSES),
    "anthropic": ("messages", ANTHROPIC),
    "gemini": ("contents", GEMINI),
}


@pytest.mark.parametrize("history", CANONICAL)
@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("kind", ENGINES)
def test_a_history_is_the_same_from_every_dialect_to_every_engine(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, kind: str, dialect: str, history: str
) -> None:
    field, histories = BODIES[dialect]
    tools = [] if history == "no calls" else TOOLS[dialect]
    document = {"model": "policy", "max_tokens": 9, field: histories[history], "tools": tools}
    expected = copy.deepcopy(CANONICAL[history])
    with running_proxy(tmp_path, engine.url, rendering, engine=kind) as proxy:
        session = proxy.open()
        answer = post(session, dialect, document)
        assert answer.status_code == 200, answer.text
        [recorded] = session.end()[1].calls
    assert recorded.opened.messages == expected
    sent = engine.requests[-1]
    if "input_ids" in sent:
        assert sent["input_ids"] == rendering.render(expected, recorded.opened.tools).tolist()
    else:
        assert sent["messages"] == expected
        assert ("tools" in sent) == bool(tools)
