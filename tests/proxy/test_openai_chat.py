"""The official OpenAI SDK against a real proxy: whole and streamed answers, tools over several turns, errors."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import openai
import pytest

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy

TOOL = {
    "type": "function",
    "function": {"name": "bash", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}},
}
CALL = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>'


def client(session: OpenSession, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=session.url + "/v1", api_key=session.key, max_retries=0, **options)


def said(calls: list[Any]) -> list[tuple[str, str]]:
    return [(call.function.name, call.function.arguments) for call in calls]


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_a_plain_answer_is_recorded_token_by_token(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    engine.script({"text": "hello you", "version": "7"})
    session = proxy.open()
    answer = client(session).chat.completions.create(model="policy", messages=[user("hi")])
    assert answer.choices[0].message.content == "hello you"
    assert answer.choices[0].finish_reason == "stop"
    record, log = session.end()
    [call] = log.calls
    assert rendering.decode(log.prompt_ids(call)) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert rendering.decode(call.ids) == "hello you<|im_end|>"
    assert np.all(call.logprobs == np.float32(-0.5))
    assert call.spans == [(0, len(call.ids), "7")]
    assert call.delivered
    assert call.finished.finish_reason == "stop"
    assert (record.completions, record.sampled, record.fault) == (1, len(call.ids), None)
    assert answer.usage.completion_tokens == len(call.ids)
    assert answer.usage.prompt_tokens == call.prompt_length


def test_tool_turns_continue_the_sampled_ids(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": f"look {CALL}"}, {"text": "done"})
    session = proxy.open()
    chat = client(session).chat.completions
    messages: list[Any] = [user("list")]
    first = chat.create(model="policy", messages=messages, tools=[TOOL]).choices[0]
    assert first.finish_reason == "tool_calls"
    assert first.message.content == "look"
    [asked] = first.message.tool_calls
    assert json.loads(asked.function.arguments) == {"cmd": "ls"}
    messages += [first.message, {"role": "tool", "tool_call_id": asked.id, "content": "a\nb"}]
    second = chat.create(model="policy", messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "done"
    log = session.log
    one, two = log.calls
    assert two.prompt.source == "continued"
    assert two.prompt.keep == one.length
    assert engine.requests[1]["input_ids"][: one.length] == [*log.prompt_ids(one), *one.ids]
    built = session.build()
    assert len(built.traces) == 1
    assert built.tokens.trainable == built.tokens.sampled == len(one.ids) + len(two.ids)


@pytest.mark.parametrize(
    "text", ["plain text", f"a {CALL} b {CALL}", "<think>\nhm\n</think>\n\nso", "é水🙂 <tool_call>{bad"]
)
def test_a_stream_says_what_a_whole_answer_says(engine: ScriptedEngine, proxy: RunningProxy, text: str) -> None:
    engine.script({"text": text}, {"text": text})
    session = proxy.open()
    chat = client(session).chat.completions
    whole = chat.create(model="policy", messages=[user("x")], tools=[TOOL]).choices[0]
    content, reasoning, calls, finish = "", "", [], None
    for chunk in chat.create(model="policy", messages=[user("x")], tools=[TOOL], stream=True):
        choice = chunk.choices[0]
        content += choice.delta.content or ""
        reasoning += getattr(choice.delta, "reasoning_content", None) or ""
        calls += choice.delta.tool_calls or []
        finish = choice.finish_reason or finish
    assert content == (whole.message.content or "")
    assert reasoning == (getattr(whole.message, "reasoning_content", None) or "")
    assert said(calls) == said(whole.message.tool_calls or [])
    assert finish == whole.finish_reason
    assert all(call.delivered for call in session.end()[1].calls)


def test_text_is_relayed_while_the_engine_produces_it(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": "one two", "hold": True, "after": 4})
    chat = client(proxy.open()).chat.completions
    said = ""
    for chunk in chat.create(model="policy", messages=[user("x")], stream=True):
        said += chunk.choices[0].delta.content or ""
        if said == "one":
            engine.release()
    assert said == "one two"


def test_errors_have_the_dialects_shape(proxy: RunningProxy) -> None:
    session = proxy.open()
    chat = client(session).chat.completions
    picture = {"type": "image_url", "image_url": {"url": "data:"}}
    with pytest.raises(openai.BadRequestError, match="images"):
        chat.create(model="policy", messages=[{"role": "user", "content": [picture]}])
    with pytest.raises(openai.BadRequestError) as overflow:
        chat.create(model="policy", messages=[user("x" * 5000)])
    assert overflow.value.code == "context_length_exceeded"
    record, log = session.end()
    assert record.context
    assert record.refused == 2
    assert not log.calls
    assert [refused.reason for refused in log.refusals] == ["unsupported", "context"]
    with pytest.raises(openai.AuthenticationError):
        chat.create(model="policy", messages=[user("x")])
