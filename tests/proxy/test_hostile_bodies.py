"""Odd requests get a right answer or the dialect's own 400 that names the field: never a 500 that a client would repeat
or that would cost the session an attempt, and nothing of them is dropped in silence."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from dialects import PATHS, TOOLS, body, post
from peers.engine import scripted_engine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy, user

WIDE = 10**30
"""beyond 64 bits"""
CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
REF = {"$defs": {"a": {"type": "string"}}, "type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}}


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, rendering: Rendering) -> Iterator[RunningProxy]:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path_factory.mktemp("house"), engine.url, rendering, context_length=None) as made,
    ):
        yield made


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    with httpx.Client(trust_env=False, timeout=30) as made:
        yield made


def message_of(dialect: str, answer: httpx.Response) -> str:
    """The words of an error in the dialect's own shape."""
    document = answer.json()
    if dialect == "anthropic":
        assert (document["type"], document["error"]["type"]) == ("error", "invalid_request_error")
    elif dialect == "gemini":
        assert (document["error"]["code"], document["error"]["status"]) == (400, "INVALID_ARGUMENT")
    else:
        assert document["error"]["type"] == "invalid_request_error"
    return document["error"]["message"]


def said(*messages: Any) -> dict[str, Any]:
    return {"messages": [user("x"), *messages]}


def chat_tool(**fields: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f"} | fields}]}


def contents(*parts: Any, role: str = "user") -> dict[str, Any]:
    return {"contents": [{"role": role, "parts": list(parts)}]}


def block(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [fields]}]}


def answered(*blocks: Any) -> dict[str, Any]:
    return said({"role": "assistant", "content": list(blocks)}, user("y"))


CHAT: list[tuple[dict[str, Any], str | None]] = [
    ({"n": 2}, "n: "),
    ({"best_of": 3}, "best_of: "),
    ({"stop": ["a", "b", "c", "d", "e"]}, None),
    ({"stop": [""]}, "stop: "),
    ({"stop": [1]}, "stop"),
    ({"max_tokens": 0}, "max_tokens: "),
    ({"max_tokens": -1}, "max_tokens: "),
    ({"max_completion_tokens": 0}, "max_completion_tokens: "),
    ({"max_tokens": WIDE}, "max_tokens: the number is beyond 64 bits"),
    ({"top_k": WIDE}, "top_k: the number is beyond 64 bits"),
    ({"stop_token_ids": [WIDE]}, "stop_token_ids.0: the number is beyond 64 bits"),
    ({"seed": WIDE}, None),
    ({"functions": [{"name": "f"}]}, "functions: send them as tools"),
    ({"function_call": "auto"}, "function_call: "),
    ({"modalities": ["text", "audio"]}, "modalities: 'audio'"),
    ({"web_search_options": {}}, "web_search_options: "),
    ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs: "),
    ({"continue_final_message": True}, "continue_final_message: "),
    ({"guided_json": {}}, "guided_json: send it as response_format"),
    ({"regex": "a+"}, "regex: send it as response_format"),
    ({"lora_path": "x"}, "lora_path: the policy is the model as it is served"),
    ({"stream_options": {"include_usage": "yes"}}, "include_usage: "),
    ({"response_format": {"type": "json_schema"}}, "response_format: "),
    ({"store": True, "metadata": {"a": "b"}, "user": "u", "verbosity": "low", "reasoning_effort": "high"}, None),
    ({"tools": []}, None),
    (chat_tool(parameters=REF), None),
    (chat_tool(parameters="x"), "tools.0: parameters"),
    (chat_tool(description=5), "tools.0: description"),
    (chat_tool(name=""), "tools.0: a tool has to have a name"),
    (chat_tool(parameters={"maximum": WIDE}), "parameters.maximum: the number is beyond 64 bits"),
    ({"tools": [chat_tool(name=f"t{at}")["tools"][0] for at in range(1000)]}, None),
    ({"tools": [{"type": "custom", "custom": {"name": "z"}}]}, "tools.0: "),
    (chat_tool() | {"tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice: 'custom'"),
    (chat_tool() | {"tool_choice": {"type": "function"}}, "function: field is required"),
    ({"tool_choice": "required"}, "tool_choice: there are no tools to choose from"),
    ({"tools": [{"type": "function"}]}, "tools.0.function: field is required"),
    ({"tools": [{"type": "function", "function": {}}]}, "tools.0.function.name: field is required"),
    ({"logit_bias": {"5": 1.5, "6": -100}}, None),
    ({"logit_bias": {"the": 1}}, "logit_bias: 'the' is not the id"),
    ({"logit_bias": {"-1": 1}}, "logit_bias: '-1' is not the id"),
    ({"logit_bias": {"5": 101}}, "logit_bias.5: expected a number"),
    ({"logit_bias": {"5": True}}, "logit_bias.5: expected a number"),
    ({"logit_bias": {"1000000": 1}}, "logit_bias.1000000: the ids of tokens are below "),
    ({"messages": []}, "messages: "),
    ({"messages": "x"}, "messages: "),
    (said({"role": "assistant", "content": "so"}), None),
    (said({"role": "system", "content": "s"}, user("y")), None),
    (said({"role": "tool", "tool_call_id": "nobody's", "content": "r"}), None),
    (said({"role": "assistant", "function_call": {"name": "f", "arguments": "{}"}}), "messages.1.function_call"),
    (said({"role": "assistant", "audio": {"id": "a"}}), "messages.1.audio"),
    (said({"role": "assistant", "tool_calls": [CALL | {"type": "custom"}]}), "messages.1.tool_calls.0: "),
    (said({"role": "function", "name": "f", "content": "r"}), "messages.1.role: 'function'"),
    (block(type="video_url"), "messages.0.content.0: content of type 'video_url'"),
    (block(type="text", text=5), "messages.0.content.0.text: "),
    ({"messages": [user("\u0000\ufffe")]}, None),
]
RESPONSES: list[tuple[dict[str, Any], str | None]] = [
    ({"background": True}, "background: "),
    ({"previous_response_id": "resp_1"}, "previous_response_id: "),
    ({"store": True, "truncation": "auto", "service_tier": "flex", "metadata": {"a": "b"}}, None),
    ({"top_logprobs": 5}, "top_logprobs: "),
    ({"include": ["message.output_text.logprobs"]}, "include: "),
    ({"max_output_tokens": 0}, "max_output_tokens: "),
    ({"max_output_tokens": WIDE}, "max_output_tokens: the number is beyond 64 bits"),
    ({"metadata": {"a": WIDE}}, "metadata.a: the number is beyond 64 bits"),
    ({"reasoning": {"effort": "high", "summary": "auto"}, "text": {"verbosity": "low"}}, None),
    ({"instructions": [user("x")]}, "instructions: "),
    ({"input": [{"type": "function_call_output", "call_id": "nobody's", "output": "r"}]}, None),
    ({"input": [user("x"), {"type": "message", "role": "assistant", "content": "so"}]}, None),
    ({"input": [user("x"), {"role": "system", "content": "s"}]}, None),
    ({"input": [{"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "foreign"}]}, None),
    ({"input": [{"type": "compaction", "encrypted_content": "x"}]}, "input.0: items of type 'compaction'"),
    ({"input": [user([{"type": "input_file", "file_id": "f"}])]}, "input.0.content.0: content of type 'input_file'"),
    ({"tools": [{"type": "function", "name": "f", "parameters": REF, "strict": True}]}, None),
    ({"tools": [{"type": "function", "name": "f", "parameters": "x"}]}, "tools.0: parameters"),
    ({"tools": [{"type": "mcp", "server_label": "x"}]}, "tools.0: "),
    ({"tools": [{"type": "function"}]}, "tools.0.name: field is required"),
    ({"tools": [{"type": "namespace", "name": "n", "tools": [{"type": "custom"}]}]}, "tools.0.tools.0.name: "),
    ({"tools": [{"type": "namespace", "tools": [{"type": "custom", "name": "c"}]}]}, "tools.0.name: "),
    ({"tool_choice": "required"}, "tool_choice: there are no tools"),
    ({"tools": [{"type": "function", "name": f"t{at}"} for at in range(1000)]}, None),
]
ANTHROPIC: list[tuple[dict[str, Any], str | None]] = [
    ({"max_tokens": -1}, "max_tokens: "),
    ({"stop_sequences": [""]}, "stop_sequences: "),
    ({"top_k": WIDE}, "top_k: "),
    ({"mcp_servers": [{"type": "url", "url": "x", "name": "m"}]}, "mcp_servers: "),
    ({"container": "c"}, "container: "),
    ({"thread": {"type": "create"}}, "thread: "),
    ({"compaction": {"type": "enabled"}}, "compaction: "),
    ({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}, "service_tier": "auto"}, None),
    ({"context_management": {"edits": []}, "cache_control": {"type": "ephemeral"}}, None),
    ({"messages": []}, "messages: "),
    (said({"role": "assistant", "content": "{"}), "messages: the last one is the assistant's"),
    (said({"role": "assistant", "content": "so"}, {"role": "system", "content": "s"}), None),
    (block(type="tool_result", tool_use_id="nobody's"), None),
    (block(type="tool_result", content="r"), "tool_use_id: "),
    (block(type="document", source={}), "messages.0.content.0: content of type 'document'"),
    (block(type="text", text=7), "messages.0.content.0.text: "),
    (answered({"type": "redacted_thinking", "data": "x"}), None),
    (answered({"type": "thinking", "thinking": "t", "signature": "another's"}), None),
    (answered({"type": "server_tool_use", "id": "a", "name": "web_search"}), "messages.1.content.0: "),
    (answered({"type": "tool_use", "id": "a", "name": "f", "input": [1]}), "input: expected dict"),
    ({"system": [{"type": "image"}]}, "system.0: "),
    ({"tools": [{"name": "f", "type": None, "input_schema": REF}]}, None),
    ({"tools": [{"name": "f", "input_schema": "x"}]}, "tools.0: parameters"),
    ({"tools": [{"name": f"t{at}"} for at in range(1000)]}, None),
    ({"tools": [{"type": "bash_20250124", "name": "bash"}]}, "tools.0: "),
    ({"tools": [{}]}, "tools.0.name: field is required"),
    ({"tool_choice": {"type": "any"}}, "tool_choice: there are no tools"),
    ({"tools": [{"name": "f"}], "tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, None),
]
GEMINI: list[tuple[dict[str, Any], str | None]] = [
    ({"contents": []}, "contents: "),
    ({"contents": [{"role": "user"}]}, "contents.0.parts: at least one part"),
    ({"tools": {"functionDeclarations": [{}]}}, "tools.0.functionDeclarations.0.name: field is required"),
    (contents({"text": 5}), "text: "),
    ({"continuationToken": "AA"}, "continuationToken: "),
    (contents({"hologram": {}}), "contents.0.parts.0: a part of type 'hologram'"),
    (contents({"text": "x"}, role="model"), None),
    (contents({"functionResponse": {"name": "f", "response": {"a": 1}}}), None),
    (contents({"functionResponse": {"name": "f", "response": [1]}}), "response: "),
    (contents({"functionCall": {"name": "f", "args": [1]}}, role="model"), "args: "),
    ({"contents": {"parts": {"text": "x"}}, "systemInstruction": {"parts": {"text": "s"}}}, None),
    ({"generationConfig": {"maxOutputTokens": 0}}, "maxOutputTokens: "),
    ({"generationConfig": {"topK": WIDE}}, "generationConfig.topK: "),
    ({"generationConfig": {"candidateCount": 2}}, "candidateCount: "),
    ({"generationConfig": {"stopSequences": [""]}}, "stopSequences: "),
    ({"generationConfig": {"responseLogprobs": True}}, "responseLogprobs: "),
    ({"generationConfig": {"thinkingConfig": {"thinkingBudget": 0}}, "safetySettings": []}, None),
    ({"tools": {"functionDeclarations": [{"name": "f", "parametersJsonSchema": REF}]}}, None),
    ({"tools": [{"functionDeclarations": [{"name": "f", "parameters": "x"}]}]}, "tools.0: parameters"),
    ({"tools": [{"functionDeclarations": [{"name": f"t{at}"} for at in range(1000)]}]}, None),
    ({"toolConfig": {"functionCallingConfig": {"mode": "ANY"}}}, "tool_choice: "),
]
ROWS = {"openai_chat": CHAT, "openai_responses": RESPONSES, "anthropic": ANTHROPIC, "gemini": GEMINI}
NAMED = [
    pytest.param(dialect, fields, name, id=f"{dialect}-{json.dumps(fields)[:60]}")
    for dialect, rows in ROWS.items()
    for fields, name in rows
]


@pytest.mark.parametrize(("dialect", "fields", "name"), NAMED)
def test_a_request_is_answered_or_refused_by_the_name_of_its_field(
    house: RunningProxy, client: httpx.Client, dialect: str, fields: dict[str, Any], name: str | None
) -> None:
    session = house.open()
    document = body("x") | ({"max_tokens": 50} if dialect == "anthropic" else {}) | fields
    got = raw(client, session, PATHS[dialect], json.dumps(document).encode())
    if name is None:
        assert got.status_code == 200, got.text
    else:
        assert got.status_code == 400, got.text
        assert name in message_of(dialect, got)
    record, log = session.end()
    assert record.fault is None
    assert (len(log.refusals), record.completions) == ((0, 1) if name is None else (1, 0))


RAW = {
    b'{"messages": [], "max_tokens": 1e400}': "max_tokens: the number is not finite",
    b'{"messages": [{"temperature": NaN}]}': "messages.0.temperature: the number is not finite",
    b"": "not JSON",
    b"null": "object",
    b"\xff": "not JSON",
    b'{"a": 1}{"b": 2}': "not JSON",
}


def raw(client: httpx.Client, session: OpenSession, path: str, content: bytes) -> httpx.Response:
    return client.post(session.url + path, content=content, headers={"Authorization": f"Bearer {session.key}"})


@pytest.mark.parametrize("dialect", PATHS)
def test_bytes_that_are_no_body_are_the_callers_mistake(
    house: RunningProxy, client: httpx.Client, dialect: str
) -> None:
    session, deep = house.open(), b"[" * 100_000
    nested = (b'{"messages": ' + deep, b'{"messages": ' + deep + b"]" * 100_000 + b"}")
    for content, name in {**RAW, **dict.fromkeys(nested, "")}.items():
        got = raw(client, session, PATHS[dialect], content)
        assert got.status_code == 400
        assert name in message_of(dialect, got)


@pytest.mark.parametrize("dialect", PATHS)
def test_a_character_cut_in_half_is_no_reason_to_fail(house: RunningProxy, dialect: str) -> None:
    session = house.open()
    assert post(session, dialect, body("half \ud83d", max_tokens=50)).status_code == 200
    assert session.log.calls[0].opened.messages[-1]["content"] == "half ?"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_an_engine_that_cuts_a_character_in_half_is_heard(
    tmp_path: Path, tokenizer: Path, dialect: str, stream: bool
) -> None:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, None, engine="openai", context_length=None) as proxy,
    ):
        engine.script({"text": "x", "message": {"role": "assistant", "content": "half \ud83d"}})
        got = post(proxy.open(), dialect, body("x", max_tokens=50), stream=stream)
        assert (got.status_code, "half ?" in got.text) == (200, True)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("dialect", PATHS)
def test_a_policy_that_writes_odd_arguments_costs_nothing(
    tmp_path: Path, tokenizer: Path, rendering: Rendering, dialect: str, stream: bool
) -> None:
    """Half a surrogate pair, and a number beyond 64 bits, which the harness gives back."""
    odd = '<tool_call>{"name": "bash", "arguments": {"cmd": "\\ud83d", "n": 1%s}}</tool_call>' % ("0" * 30)
    with scripted_engine(tokenizer) as engine, running_proxy(tmp_path, engine.url, rendering) as proxy:
        engine.script({"text": odd})
        session = proxy.open()
        got = post(session, dialect, body("x", tools=TOOLS[dialect], max_tokens=500), stream=stream)
        assert got.status_code == 200
        assert "bash" in got.text
        call = session.log.calls[0].finished.message["tool_calls"][0]
        turns = [user("x"), {"role": "assistant", "content": None, "tool_calls": [call]}, user("go on")]
        session.turn(turns, tools=TOOLS["openai_chat"])
        record, log = session.end()
        assert record.fault is None
        assert log.calls[1].prompt.source == "continued"


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_are_told_to_those_who_ask(house: RunningProxy, stream: bool) -> None:
    session = house.open()
    got = session.post({"model": "policy", "messages": [user("x")], "logprobs": True, "stream": stream})
    lines = [line for line in got.text.splitlines() if '"finish_reason":"stop"' in line]
    choice = json.loads(lines[0].removeprefix("data: "))["choices"][0]
    told = [(entry["token"], entry["logprob"]) for entry in choice["logprobs"]["content"]]
    assert told == [("o", -0.5), ("k", -0.5), ("<|im_end|>", -0.5)]


def test_a_choice_among_allowed_tools_leaves_the_others_out(house: RunningProxy) -> None:
    session = house.open()
    tools = [chat_tool(name=name)["tools"][0] for name in ("f", "g")]
    allowed = {"mode": "auto", "tools": [{"type": "function", "function": {"name": "g"}}]}
    choice = {"type": "allowed_tools", "allowed_tools": allowed}
    session.turn([user("x")], tools=tools, tool_choice=choice)
    assert [tool["function"]["name"] for tool in session.log.calls[0].opened.tools] == ["g"]
