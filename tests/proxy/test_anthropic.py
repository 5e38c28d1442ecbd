"""The official Anthropic SDK against a real proxy: whole and streamed answers, tools, thinking, errors."""

from __future__ import annotations

from typing import Any

import anthropic
import pytest

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy

TOOL = {"name": "bash", "input_schema": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
CALL = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>'


def client(session: OpenSession, **options: Any) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=session.url, api_key=session.key, max_retries=0, **options)


def ask(session: OpenSession, messages: Any, **options: Any) -> Any:
    return client(session).messages.create(model="policy", max_tokens=500, messages=messages, **options)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def test_tools_and_thinking_over_several_turns_are_one_chain(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": f"<think>\nhm\n</think>\n\nlook {CALL}{CALL}"}, {"text": "done"}, {"text": "bye"})
    session = proxy.open()
    messages: list[Any] = [user("list")]
    first = ask(session, messages, tools=[TOOL], system="be brief")
    assert first.stop_reason == "tool_use"
    assert [block.type for block in first.content] == ["thinking", "text", "tool_use", "tool_use"]
    results = [
        {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "a"}]}
        for block in first.content[2:]
    ]
    messages += [{"role": "assistant", "content": first.content}, user([*results, {"type": "text", "text": "go on"}])]
    second = ask(session, messages, tools=[TOOL], system=[{"type": "text", "text": "be brief"}])
    assert [block.text for block in second.content] == ["done"]
    # Without its thinking, with a system message in the middle, and a marker that wanders.
    del messages[1]["content"][0]
    messages += [{"role": "assistant", "content": "done"}, {"role": "system", "content": "reminder"}]
    messages += [user([{"type": "text", "text": "more", "cache_control": {"type": "ephemeral"}}])]
    third = ask(session, messages, tools=[TOOL], system="be brief")
    assert third.stop_reason == "end_turn"
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued", "continued"]
    assert len(session.build().traces) == 1


@pytest.mark.parametrize("text", ["plain", f"a {CALL} b {CALL}", "<think>hm</think>\n\nso", "é🙂 <tool_call>{bad", ""])
def test_a_stream_says_what_a_whole_answer_says(engine: ScriptedEngine, proxy: RunningProxy, text: str) -> None:
    engine.script({"text": text}, {"text": text})
    session = proxy.open()
    whole = ask(session, [user("x")], tools=[TOOL])
    settings = {"model": "policy", "max_tokens": 500, "messages": [user("x")], "tools": [TOOL]}
    with client(session).messages.stream(**settings) as stream:
        streamed = stream.get_final_message()
    hidden = {"id", "parsed_output"}
    assert [without(block, hidden) for block in streamed.content] == [without(block, hidden) for block in whole.content]
    assert (streamed.stop_reason, streamed.usage.output_tokens) == (whole.stop_reason, whole.usage.output_tokens)
    assert streamed.usage.input_tokens == whole.usage.input_tokens
    assert all(call.delivered for call in session.end()[1].calls)


def without(block: Any, names: set[str]) -> dict[str, Any]:
    return {name: value for name, value in block.to_dict().items() if name not in names}


def test_a_stop_sequence_is_named_and_not_shown(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    step = {"text": "yes\nSTOP", "matched": "STOP"}
    engine.script(step, step)
    session = proxy.open()
    whole = ask(session, [user("x")], stop_sequences=["STOP"])
    assert (whole.stop_reason, whole.stop_sequence, whole.content[0].text) == ("stop_sequence", "STOP", "yes\n")
    with client(session).messages.stream(
        model="policy", max_tokens=500, messages=[user("x")], stop_sequences=["STOP"]
    ) as stream:
        assert stream.get_final_text() == "yes\n"


def test_tokens_are_counted_without_an_engine_call(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    session = proxy.open()
    counted = client(session).messages.count_tokens(model="policy", messages=[user("hello")])
    assert counted.input_tokens == len(rendering.render([user("hello")], None))
    assert engine.requests == []


def test_models_are_listed(proxy: RunningProxy) -> None:
    models = client(proxy.open()).models.list()
    assert [model.id for model in models] == ["policy", "policy-aux"]


def test_errors_have_the_dialects_shape(proxy: RunningProxy) -> None:
    session = proxy.open()
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": ""}}
    with pytest.raises(anthropic.BadRequestError, match="image"):
        ask(session, [user([picture])])
    with pytest.raises(anthropic.BadRequestError, match=r"prompt is too long: 5.* tokens > 4096 maximum"):
        ask(session, [user("x" * 5000)])
    with pytest.raises(anthropic.BadRequestError, match="web_search"):
        ask(session, [user("x")], tools=[{"type": "web_search_20250305", "name": "web_search"}])
    record, _ = session.end()
    assert record.context
    assert record.refused == 3
    with pytest.raises(anthropic.AuthenticationError):
        ask(session, [user("x")])
