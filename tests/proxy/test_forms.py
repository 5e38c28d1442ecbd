"""Structured output and forced tool calls: read in every dialect, held by grammars or refused by name; not trained."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dialects import TOOLS, body, end_of, post, text_of
from peers.chat_templates import CALLS, STYLES
from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from polar.proxy.rendering import load_rendering
from running_proxy import RunningProxy, running_proxy, user

SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
GOOGLES = {"type": "OBJECT", "properties": {"ok": {"type": "BOOLEAN"}}, "required": ["ok"]}
FORMS: dict[str, list[dict[str, Any]]] = {
    "openai_chat": [{"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}}],
    "openai_responses": [{"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}],
    "anthropic": [
        {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}, "max_tokens": 50},
        {"output_format": {"type": "json_schema", "schema": SCHEMA}, "max_tokens": 50},
    ],
    "gemini": [
        {"generationConfig": {"responseMimeType": "application/json", "responseJsonSchema": SCHEMA}},
        {"generationConfig": {"response_mime_type": "application/json", "response_schema": GOOGLES}},
    ],
}
ANY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "openai_chat": ({"response_format": {"type": "json_object"}}, {"type": "object"}),
    "openai_responses": ({"text": {"format": {"type": "json_object"}}}, {"type": "object"}),
    "gemini": ({"generationConfig": {"responseMimeType": "application/json"}}, {}),
}
FORCED: dict[str, list[dict[str, Any]]] = {
    "openai_chat": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "function": {"name": "bash"}}}],
    "openai_responses": [{"tool_choice": "required"}, {"tool_choice": {"type": "function", "name": "bash"}}],
    "anthropic": [{"tool_choice": {"type": "any"}}, {"tool_choice": {"type": "tool", "name": "bash"}}],
    "gemini": [{"toolConfig": {"functionCallingConfig": {"mode": "ANY", "allowedFunctionNames": ["bash"]}}}],
}
CALL = '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>'
BY_CHOICE = [(dialect, fields) for dialect, choices in FORCED.items() for fields in choices]
BY_FORM = [(dialect, fields) for dialect, forms in FORMS.items() for fields in forms]
PLAIN = {"anthropic": {"max_tokens": 50}}


@pytest.mark.parametrize(("dialect", "fields"), BY_FORM)
@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_reaches_the_grammar_and_its_answer_is_context_alone(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str, fields: dict[str, Any], stream: bool
) -> None:
    engine.script({"text": '{"ok": true}'}, {"text": "well"})
    session = proxy.open()
    answered = post(session, dialect, body("is it so?", **fields), stream=stream)
    assert answered.status_code == 200, answered.text
    assert json.loads(engine.requests[0]["sampling_params"]["json_schema"]) == SCHEMA
    free = PLAIN.get(dialect, {})
    assert post(session, dialect, body("is it so?", '{"ok": true}', "fine", **free)).status_code == 200
    assert "json_schema" not in engine.requests[1]["sampling_params"]
    _, log = session.end()
    assert [call.opened.constrained for call in log.calls] == [True, False]
    assert log.calls[1].prompt.source == "continued"
    built = session.build()
    assert built.tokens.excluded == {"constrained": len(log.calls[0].ids)}
    [trace] = built.traces
    assert trace.trainable == len(log.calls[1].ids)
    assert trace.prompt_ids.tolist() == log.prompt_ids(log.calls[1]).tolist()


@pytest.mark.parametrize("dialect", ANY)
def test_any_json_is_a_schema_too(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    fields, schema = ANY[dialect]
    engine.script({"text": "{}"})
    assert post(proxy.open(), dialect, body("is it so?", **fields)).status_code == 200
    assert json.loads(engine.requests[0]["sampling_params"]["json_schema"]) == schema


@pytest.mark.parametrize(("dialect", "fields"), BY_CHOICE)
def test_a_forced_call_is_a_structure_in_the_models_own_format(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str, fields: dict[str, Any]
) -> None:
    engine.script({"text": CALL})
    session = proxy.open()
    answered = post(session, dialect, body("look", tools=TOOLS[dialect], **fields, **PLAIN.get(dialect, {})))
    assert answered.status_code == 200, answered.text
    tag = json.loads(engine.requests[0]["sampling_params"]["structural_tag"])["format"]
    assert (tag["type"], tag["end"]) == ("tag", "}\n</tool_call>")
    assert tag["begin"] == '<tool_call>\n{"name": "bash", "arguments": '
    assert tag["content"]["json_schema"]["properties"] == {"cmd": {"type": "string"}}
    [call] = session.log.calls
    assert call.opened.constrained
    assert call.finished.message["tool_calls"][0]["function"]["name"] == "bash"


def test_a_schema_beside_tools_leaves_the_choice(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": CALL}, {"text": '{"ok": true}'})
    session = proxy.open()
    asked = body("look", tools=TOOLS["openai_chat"], **FORMS["openai_chat"][0])
    assert end_of("openai_chat", post(session, "openai_chat", asked).json()) == "tool_calls"
    either = json.loads(engine.requests[0]["sampling_params"]["structural_tag"])["format"]
    assert [choice["type"] for choice in either["elements"]] == ["json_schema", "tag"]
    answered = post(session, "openai_chat", asked | {"tool_choice": "none"})
    assert text_of("openai_chat", answered.json()) == '{"ok": true}'
    assert json.loads(engine.requests[1]["sampling_params"]["json_schema"]) == SCHEMA


@pytest.mark.parametrize("style", ["qwen", "llama", "deepseek"])
def test_a_forced_call_is_written_as_a_policy_writes_it(tmp_path: Path, style: str) -> None:
    parameters = {"type": "object"}
    tool = {"type": "function", "function": {"name": "bash", "parameters": parameters}}
    tag = load_rendering(STYLES[style].make(tmp_path)).grammar(None, [tool])
    assert tag is not None
    assert tag["begin"] + '{"cmd": "ls"}' + tag["end"] == CALLS[style]
    assert tag["content"]["json_schema"] == parameters


def test_reasoning_that_the_prompt_has_opened_comes_first(tmp_path: Path) -> None:
    grammar = load_rendering(STYLES["open_thinking"].make(tmp_path)).grammar(SCHEMA, None)
    assert grammar is not None
    thoughts, answer = grammar["elements"]
    assert (grammar["type"], thoughts["end"], answer["json_schema"]) == ("sequence", "</think>\n\n", SCHEMA)


CHAT_FIELDS = [*FORMS["openai_chat"], *FORCED["openai_chat"]]


@pytest.mark.parametrize("fields", CHAT_FIELDS)
@pytest.mark.parametrize("kind", ["vllm", "openai"])
def test_engines_that_take_messages_are_asked_in_their_own_words(
    engine: ScriptedEngine, tmp_path: Path, kind: str, fields: dict[str, Any]
) -> None:
    with running_proxy(tmp_path, engine.url, None, engine=kind, context_length=None) as proxy:
        session = proxy.open()
        assert post(session, "openai_chat", body("look", tools=TOOLS["openai_chat"], **fields)).status_code == 200
        asked = engine.requests[0]
        if "tool_choice" in fields:
            assert asked["tool_choice"] == fields["tool_choice"]
        else:
            assert asked["response_format"]["json_schema"]["schema"] == SCHEMA
        assert session.log.calls[0].opened.constrained
        assert session.build().tokens.trainable == 0


ONE_AT_A_TIME: dict[str, dict[str, Any]] = {
    "openai_chat": {"parallel_tool_calls": False},
    "openai_responses": {"parallel_tool_calls": False},
    "anthropic": {"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}, "max_tokens": 50},
}


@pytest.mark.parametrize("dialect", ONE_AT_A_TIME)
def test_engines_that_take_messages_are_told_that_calls_come_one_at_a_time(
    engine: ScriptedEngine, chat_proxy: RunningProxy, dialect: str
) -> None:
    session = chat_proxy.open()
    for fields in (ONE_AT_A_TIME[dialect], PLAIN.get(dialect, {})):
        assert post(session, dialect, body("look", tools=TOOLS[dialect], **fields)).status_code == 200
    assert [request.get("parallel_tool_calls") for request in engine.requests] == [False, None]


@pytest.mark.parametrize("dialect", ONE_AT_A_TIME)
def test_with_ids_in_an_answer_of_several_calls_is_passed_on_as_it_was_sampled(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    engine.script({"text": CALL + CALL})
    session = proxy.open()
    fields = ONE_AT_A_TIME[dialect] | {"max_tokens": 900}
    answered = post(session, dialect, body("look", tools=TOOLS[dialect], **fields))
    assert answered.text.count('"bash"') >= 2
    assert len(session.log.calls[0].finished.message["tool_calls"]) == 2
    assert not session.log.calls[0].opened.constrained


@pytest.mark.parametrize("fields", CHAT_FIELDS)
def test_an_engine_without_grammars_refuses_by_name(
    engine: ScriptedEngine, tmp_path: Path, rendering: Rendering, fields: dict[str, Any]
) -> None:
    with running_proxy(tmp_path, engine.url, rendering, engine="embedded") as proxy:
        session = proxy.open()
        refused = post(session, "openai_chat", body("look", tools=TOOLS["openai_chat"], **fields))
        assert refused.status_code == 400
        assert "auto" in refused.json()["error"]["message"]
        assert session.log.refusals[0].reason == "unsupported"
        assert not engine.requests


def test_a_format_that_cannot_be_held_is_refused_by_name(engine: ScriptedEngine, tmp_path: Path) -> None:
    rendering = load_rendering(STYLES["coder"].make(tmp_path / "coder"))
    with running_proxy(tmp_path, engine.url, rendering) as proxy:
        refused = post(proxy.open(), "openai_chat", body("look", tools=TOOLS["openai_chat"], tool_choice="required"))
        assert refused.status_code == 400
        assert "tool_choice" in refused.json()["error"]["message"]


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "nobody"}}])
def test_a_choice_of_no_tool_is_refused(proxy: RunningProxy, choice: Any) -> None:
    tools = [] if choice == "required" else TOOLS["openai_chat"]
    refused = post(proxy.open(), "openai_chat", body("look", tools=tools, tool_choice=choice))
    assert (refused.status_code, "tool_choice" in refused.text) == (400, True)


@pytest.mark.parametrize("stream", [False, True])
def test_what_the_engine_does_not_take_of_a_request_is_told_to_the_harness(
    engine: ScriptedEngine, proxy: RunningProxy, stream: bool
) -> None:
    engine.script({"refuse": "Failed to compile json grammar: no such type"})
    session = proxy.open()
    refused = session.post({"model": "policy", "messages": [user("x")], "stream": stream, **FORMS["openai_chat"][0]})
    assert "Failed to compile json grammar" in refused.text
    session.turn([user("x")])
    record, log = session.end()
    assert record.fault is None
    assert [call.finished.fault for call in log.calls] == ["engine_refused", None]


PENALTIES = [{"frequency_penalty": 0.5}, {"presence_penalty": -1}]


@pytest.mark.parametrize("fields", PENALTIES)
def test_a_penalty_trains_nothing(engine: ScriptedEngine, proxy: RunningProxy, fields: dict[str, Any]) -> None:
    session = proxy.open()
    session.turn([user("x")], **fields)
    session.turn([user("x")], **dict.fromkeys(fields, 0))
    assert [call.opened.constrained for call in session.log.calls] == [True, False]


@pytest.mark.parametrize("forced", [{"regex": "a+"}, {"repetition_penalty": 1.1}, {"logit_bias": {"5": 1.0}}])
def test_a_form_forced_by_the_task_trains_nothing_either(proxy: RunningProxy, forced: dict[str, Any]) -> None:
    session = proxy.open(sampling=forced)
    session.turn([user("x")])
    assert list(session.build().tokens.excluded) == ["constrained"]


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_call_under_a_grammar_that_new_weights_abort_begins_again(
    tokenizer: Path, rendering: Rendering, tmp_path: Path, kind: str
) -> None:
    """A grammar would start anew in the middle of an answer."""
    made = rendering if kind == "sglang" else None
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, made, engine=kind) as proxy,
    ):
        engine.script({"text": '{"ok"', "finish": "abort"}, {"text": '{"ok": true}'})
        session = proxy.open()
        assert session.turn([user("x")], **CHAT_FIELDS[0])["content"] == '{"ok": true}'
        record, log = session.end()
        cut, whole = log.calls
        assert (record.completions, record.fault) == (1, None)
        assert [call.finished.finish_reason for call in log.calls] == ["abort", "stop"]
        assert log.prompt_ids(cut).tolist() == log.prompt_ids(whole).tolist()
        built = session.build()
        assert built.tokens.excluded == {"aborted": len(cut.ids), "constrained": len(whole.ids)}
