"""Responses through the official OpenAI SDK against a real proxy, and its events beside golden ones."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.responses import ResponseStreamEvent
from pydantic import TypeAdapter

from peers.engine import ScriptedEngine
from polar.protocols import Delta, Rendering
from polar.proxy.canonical import Answer, Ask, Opening, Refusal
from polar.proxy.conversation import gist
from polar.proxy.dialects import DIALECTS
from running_proxy import OpenSession, RunningProxy, running_proxy, until

RESPONSES = DIALECTS["openai_responses"]
GOLDEN = Path(__file__).parent / "golden" / "openai_responses.txt"
TOOL = {"type": "function", "name": "bash", "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}}}
PATCH = {"type": "custom", "name": "apply_patch", "description": "Edits files."}
GROUP = {"type": "namespace", "name": "team", "description": "Others.", "tools": [{**TOOL, "name": "ask"}]}
THINKING = "reasoning.encrypted_content"


def said_call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def client(session: OpenSession, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=session.url + "/v1", api_key=session.key, max_retries=0, **options)


def ask(session: OpenSession, items: Any, **options: Any) -> Any:
    return client(session).responses.create(model="policy", input=items, **options)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def output(call: Any, text: Any) -> dict[str, Any]:
    return {"type": f"{call.type}_output", "call_id": call.call_id, "output": text}


def events(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: ")]


def fold(happened: list[dict[str, Any]]) -> dict[str, Any]:
    """The response that a client has which knows nothing but the events before the last one."""
    items: dict[int, dict[str, Any]] = {}
    for event in happened[:-1]:
        kind, item = event["type"].removeprefix("response."), items.get(event.get("output_index", -1), {})
        if kind == "output_item.added":
            items[event["output_index"]] = dict(event["item"])
        elif kind == "content_part.added":
            item["content"] = [*item["content"], dict(event["part"])]
        elif kind in ("output_text.delta", "reasoning_text.delta"):
            item["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        elif kind == "custom_tool_call_input.delta":
            item["input"] += event["delta"]
        elif kind == "output_item.done":
            hidden = {"status": event["item"]["status"]}
            hidden |= {"encrypted_content": None} if item["type"] == "reasoning" else {}
            assert item | hidden == event["item"] | hidden
            items[event["output_index"]] = event["item"]
    return happened[-1]["response"] | {"output": [items[at] for at in sorted(items)]}


# Turns, through the SDK


def test_tools_and_thinking_over_several_turns_are_one_chain(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    patch = '*** Begin Patch\n+é "x"\n*** End Patch'
    calls = said_call("bash", cmd="ls") + said_call("apply_patch", input=patch) + said_call("team__ask", cmd="?")
    engine.script(
        {"text": f"<think>\nhm\n</think>\n\nlook {calls}"}, {"text": "<think>so</think>done"}, {"text": "bye"}
    )
    session = proxy.open()
    options = {"tools": [TOOL, PATCH, GROUP], "store": False, "include": [THINKING], "instructions": "be brief"}
    items: list[Any] = [user("list"), {"role": "developer", "content": "now"}]
    first = ask(session, items, **options)
    assert (first.status, first.output_text) == ("completed", "look")
    thought, text, bash, custom, asked = first.output
    assert thought.content[0].text == "hm"
    assert json.loads(bash.arguments) == {"cmd": "ls"}
    assert (custom.type, custom.name, custom.input) == ("custom_tool_call", "apply_patch", patch)
    assert (asked.name, asked.namespace) == ("ask", "team")
    assert [text.id, bash.id] == [f"msg_{first.id[5:]}_1", f"fc_{first.id[5:]}_2"]
    parts = [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]
    items += [*first.output, output(bash, "a"), output(custom, parts), output(asked, "!")]
    items += [{"role": "developer", "content": [{"type": "input_text", "text": "hurry"}]}]
    second = ask(session, items, **options)
    assert second.output_text == "done"
    # As a client gives it back that keeps no reasoning.
    items = [item for item in items if getattr(item, "type", "") != "reasoning"]
    third = ask(session, [*items, second.output[1], user("more")], **options)
    assert third.output_text == "bye"
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued", "continued"]
    built = session.build()
    assert len(built.traces) == 1
    assert built.tokens.trainable == built.tokens.sampled
    assert "hurry" in rendering.decode(log.prompt_ids(log.calls[1]))


def test_reasoning_comes_back_as_whatever_a_client_keeps_of_it(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    items: list[Any] = [user("x")]
    for keeps in ("encrypted_content", "content", "nothing", "an edit"):
        engine.script({"text": "<think>hm</think>a"})
        thought, text = ask(session, items, store=False, include=[THINKING]).output
        kept = {"type": "reasoning", "id": thought.id, "summary": []}
        if keeps == "encrypted_content":
            kept["encrypted_content"] = thought.encrypted_content
        elif keeps == "content":
            kept["content"] = [{"type": "reasoning_text", "text": "hm"}]
        elif keeps == "an edit":
            kept |= {"summary": [{"type": "summary_text", "text": "another"}], "encrypted_content": "b3RoZXI="}
        items += [kept, text, user("on")]
    ask(session, items)
    _, log = session.end()
    assert [call.prompt.expected for call in log.calls] == [None, 1, 2, 3, 3]


@pytest.mark.parametrize(
    "text",
    [
        "plain",
        f"a {said_call('bash', cmd='ls')} {said_call('apply_patch', input='é')}",
        "<think>hm</think>",
        "é🙂 <tool_call>{",
        "",
    ],
)
def test_a_stream_says_what_a_whole_answer_says(engine: ScriptedEngine, proxy: RunningProxy, text: str) -> None:
    session = proxy.open()
    settings: dict[str, Any] = {"model": "policy", "input": "x", "tools": [TOOL, PATCH], "include": [THINKING]}

    async def streamed() -> Any:
        asking = openai.AsyncOpenAI(base_url=session.url + "/v1", api_key=session.key, max_retries=0)
        async with asking.responses.stream(**settings) as stream:
            return await stream.get_final_response()

    engine.script(*[{"text": text}] * 3)
    whole = client(session).responses.create(**settings)
    with client(session).responses.stream(**settings) as stream:
        happened = list(stream)
        answers = [stream.get_final_response(), asyncio.run(streamed())]
    assert [event.sequence_number for event in happened] == list(range(len(happened)))
    assert [plain(answer) for answer in answers] == [plain(whole)] * 2
    assert len({answer.id for answer in [whole, *answers]}) == 3
    assert all(call.delivered for call in session.end()[1].calls)


def plain(answer: Any) -> dict[str, Any]:
    """Without what only this call has, and what only the SDK adds."""
    document = json.loads(json.dumps(answer.to_dict()).replace(answer.id[5:], "ID"))
    added = [part.pop("parsed", None) for item in document["output"] for part in item.get("content") or []]
    added += [item.pop("parsed_arguments", None) for item in document["output"]]
    del document["created_at"]
    return document


def test_a_cut_answer_is_incomplete(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": "one two three"}, {"text": "one two three"})
    session = proxy.open()
    whole = ask(session, "x", max_output_tokens=5)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert whole.output[0].status == "incomplete"
    assert whole.usage.output_tokens == 5
    *_, last = ask(session, "x", max_output_tokens=5, stream=True)
    assert (last.type, last.response.output[0].status) == ("response.incomplete", "incomplete")
    assert plain(last.response) == plain(whole)


def test_tokens_are_counted_without_an_engine_call(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    counted = client(proxy.open()).responses.input_tokens.count(model="policy", input="hello")
    assert counted.input_tokens == len(rendering.render([user("hello")], None))
    assert engine.requests == []


def test_what_cannot_be_done_is_refused_by_name(proxy: RunningProxy) -> None:
    session = proxy.open()
    refused: dict[str, dict[str, Any]] = {
        "previous_response_id: .* send the whole conversation": {"previous_response_id": "resp_1"},
        "conversation": {"conversation": "conv_1"},
        "background": {"background": True},
        "text.format: 'grammar'": {"text": {"format": {"type": "grammar"}}},
        "images": {"input": [user([{"type": "input_image", "image_url": "data:"}])]},
        "'item_reference'": {"input": [{"type": "item_reference", "id": "msg_1"}]},
        "'local_shell_call'": {"input": [{"type": "local_shell_call", "call_id": "1"}]},
        "'local_shell'": {"tools": [{"type": "local_shell"}]},
        "tool_choice: 'web_search'": {"tools": [{"type": "web_search"}], "tool_choice": {"type": "web_search"}},
        "role: 'nobody'": {"input": [{"role": "nobody", "content": "x"}]},
        "top_p": {"top_p": 9},
        "at least one item": {"input": []},
    }
    for message, fields in refused.items():
        with pytest.raises(openai.BadRequestError, match=message):
            client(session).responses.create(**({"model": "policy", "input": "x"} | fields))
    with pytest.raises(openai.BadRequestError) as overflow:
        ask(session, "x" * 5000)
    assert overflow.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError, match="no such route: GET /v1/responses/resp_1"):
        client(session).responses.retrieve("resp_1")
    record, log = session.end()
    assert record.context
    assert len(log.refusals) == len(refused) + 1
    assert not log.calls
    with pytest.raises(openai.AuthenticationError):
        ask(session, "x")


def test_tools_are_offered_as_the_model_can_call_them() -> None:
    grammar = {"type": "grammar", "syntax": "lark", "definition": "start: X"}
    body = {
        "model": "policy",
        "input": [
            {"type": "additional_tools", "role": "developer", "tools": [{**PATCH, "format": grammar}]},
            user("x"),
        ],
        "tools": [TOOL, GROUP, {"type": "web_search"}],
    }
    asked = RESPONSES.parse(body, "/v1/responses")
    assert [tool["function"]["name"] for tool in asked.tools or []] == ["bash", "team__ask", "apply_patch"]
    patch = (asked.tools or [])[2]["function"]
    assert patch["description"] == "Edits files.\nThe input follows this lark grammar:\nstart: X"
    assert patch["parameters"]["required"] == ["input"]
    answered = RESPONSES.whole(answer_of(asked, {"content": "", "tool_calls": [tool_call("nobody", "{}")]}))
    assert [tool["type"] for tool in answered["tools"]] == ["function", "namespace", "custom"]
    assert answered["output"][0]["name"] == "nobody"
    allowed = {"type": "allowed_tools", "mode": "required", "tools": [{"type": "custom", "name": "apply_patch"}]}
    narrowed = RESPONSES.parse(body | {"tool_choice": allowed}, "/v1/responses")
    assert (narrowed.tool_choice, narrowed.tools) == ("required", (asked.tools or [])[2:])
    for choice, meant in (("none", "none"), ({"type": "function", "name": "bash"}, {"name": "bash"})):
        assert RESPONSES.parse(body | {"tool_choice": choice}, "/v1/responses").tool_choice == meant


# Streams that break, as Codex has them


def hang_up(session: OpenSession, document: dict[str, Any], seen: bytes) -> bytes:
    """Closes the socket as soon as `seen` has come; gives what came."""
    data = json.dumps(document).encode()
    host, _, port = session.url.removeprefix("http://").partition(":")
    head = f"POST /v1/responses HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        came = b""
        while seen not in came:
            came += sock.recv(65536)
    return came


def test_a_second_try_after_a_broken_stream_joins_the_call(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering
) -> None:
    """Codex writes its metadata in another order each time, and keeps items that were whole when the stream broke."""
    engine.script({"text": "<think>hm</think>one two", "hold": True, "after": 10}, {"text": "bye"})
    metadata = [("turn_id", "1"), ("session_id", "2")]
    asked: dict[str, Any] = {"model": "policy", "stream": True, "input": [user("x")], "include": [THINKING]}
    with running_proxy(tmp_path, engine.url, rendering, grace_seconds=30.0) as patient:
        session = patient.open()
        came = hang_up(session, asked | {"client_metadata": dict(metadata)}, b"event: response.output_item.done")
        lines = [line for line in came.split(b"\n") if b"output_item.done" in line and line.startswith(b"data: ")]
        thought = json.loads(lines[0][6:])["item"]
        again = asked | {"input": [user("x"), thought], "client_metadata": dict(reversed(metadata))}
        engine.release()
        happened = events(session.post(again, "/v1/responses").content)
        assert happened[-1]["type"] == "response.completed"
        assert len(engine.requests) == 1
        items = [user("x"), thought, *happened[-1]["response"]["output"], user("y")]
        session.post(asked | {"input": items}, "/v1/responses")
        _, log = session.end()
        assert [(call.joined, call.delivered) for call in log.calls] == [(1, True), (0, True)]
        assert log.calls[1].prompt.source == "continued"
        assert len(session.build().traces) == 1


def test_thoughts_of_an_answer_that_never_came_are_not_part_of_the_conversation(
    engine: ScriptedEngine, proxy: RunningProxy
) -> None:
    """The call was aborted meanwhile: it is sampled anew, and goes on from there."""
    engine.script({"text": "<think>hm</think>one two", "hold": True, "after": 10}, {"text": "a"}, {"text": "b"})
    session = proxy.open()
    asked: dict[str, Any] = {"model": "policy", "stream": True, "input": [user("x")]}
    came = hang_up(session, asked, b"event: response.output_item.done")
    thought = next(
        event["item"] for event in events(came.split(b"\r\n\r\n", 1)[1]) if "output_item.done" in event["type"]
    )
    until(lambda: session.log.calls[0].finished is not None)
    happened = events(session.post(asked | {"input": [user("x"), thought]}, "/v1/responses").content)
    items = [user("x"), thought, *happened[-1]["response"]["output"], user("y")]
    session.post(asked | {"input": items}, "/v1/responses")
    _, log = session.end()
    assert [call.prompt.expected for call in log.calls] == [None, None, 2]
    assert log.prompt_ids(log.calls[0]).tolist() == log.prompt_ids(log.calls[1]).tolist()


def test_a_silent_stream_says_events_that_every_client_knows(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering
) -> None:
    """Comments would not do: Codex counts them as silence."""
    with running_proxy(tmp_path, engine.url, rendering, keep_alive_seconds=0.01) as proxy:
        engine.script({"text": "late", "hold": True})
        seen = []
        with client(proxy.open()).responses.stream(model="policy", input="x") as stream:
            for event in stream:
                seen.append(event.type)
                if seen.count("response.in_progress") == 3:
                    engine.release()
            assert stream.get_final_response().output_text == "late"
        assert seen[0] == "response.created"


# Streams, event by event


def answer_of(asked: Ask, message: dict[str, Any], finish: str = "stop") -> Answer:
    opening = Opening(
        id="0123456789abcdef01234567", model="policy", created=1700000000, prompt_tokens=7, echo=asked.echo
    )
    said = {"role": "assistant"} | message
    return Answer(opening=opening, message=said, finish_reason=finish, completion_tokens=5)


def tool_call(name: str, arguments: str, call_id: str = "call_1") -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": arguments}}


def streamed(answer: Answer, deltas: list[Delta]) -> bytes:
    encoder = RESPONSES.encoder(answer.opening)
    return encoder.start() + b"".join(map(encoder.delta, deltas)) + encoder.end(answer)


def parsed(**fields: Any) -> Ask:
    body = {"model": "policy", "input": "x", "tools": [TOOL, PATCH, GROUP], "include": [THINKING]}
    return RESPONSES.parse(body | fields, "/v1/responses")


def test_events_are_the_golden_ones_and_what_the_sdk_declares() -> None:
    calls = [tool_call("bash", '{"cmd": "ls"}'), tool_call("apply_patch", '{"input": "+é"}', "call_2")]
    answer = answer_of(parsed(tools=[PATCH]), {"reasoning_content": "hm", "content": "a b", "tool_calls": calls})
    deltas = [Delta(kind="reasoning", text="hm"), Delta(kind="text", text="a"), Delta(kind="text", text=" b")]
    happened = streamed(answer, [*deltas, *(Delta(kind="tool_call", call=call) for call in calls)])
    assert happened.decode() == GOLDEN.read_text()
    for event in events(happened):
        assert not TypeAdapter(ResponseStreamEvent).validate_python(event).model_extra


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS, lambda inner: st.lists(inner, max_size=2), max_leaves=3
)
ARGUMENTS = (
    st.one_of(TEXTS.map(lambda text: {"input": text}), st.dictionaries(st.sampled_from(["input", "cmd"]), VALUES)).map(
        json.dumps
    )
    | TEXTS
)
CALLS = st.lists(st.tuples(st.sampled_from(["bash", "apply_patch", "team__ask", "other"]), ARGUMENTS), max_size=3)


@given(reasoning=TEXTS, pieces=st.lists(TEXTS, max_size=3), calls=CALLS, cut=st.booleans())
def test_whole_and_streamed_answers_are_equal_and_come_back_as_they_went(
    reasoning: str, pieces: list[str], calls: list[tuple[str, str]], cut: bool
) -> None:
    named = [tool_call(name, arguments, f"call_{at}") for at, (name, arguments) in enumerate(calls)]
    message = {"content": "".join(pieces)} | ({"reasoning_content": reasoning} if reasoning else {})
    message |= {"tool_calls": named} if named else {}
    answer = answer_of(parsed(), message, "length" if cut else "stop")
    deltas = [Delta(kind="reasoning", text=reasoning)] if reasoning else []
    deltas += [Delta(kind="text", text=piece) for piece in pieces if piece]
    happened = events(streamed(answer, [*deltas, *(Delta(kind="tool_call", call=call) for call in named)]))
    whole = json.loads(json.dumps(RESPONSES.whole(answer)))
    assert happened[-1]["response"] == whole
    assert fold(happened) == whole
    assert [event["sequence_number"] for event in happened] == list(range(len(happened)))
    back = parsed(input=[user("x"), *whole["output"], user("y")]).messages[1]
    assert gist(back) == gist({"role": "assistant"} | message)
    assert back.get("reasoning_content", "") == reasoning


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXTS,
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.sampled_from(["type", "name", "text"]), inner),
    max_leaves=4,
)
KINDS = ["message", "reasoning", "function_call", "custom_tool_call_output", "additional_tools", "namespace", "custom"]
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(KINDS) | ANY},
    optional=dict.fromkeys(
        ("id", "role", "content", "tools", "call_id", "name", "input", "output", "summary", "format"), ANY
    ),
)


@given(
    items=st.lists(ITEMS, max_size=3) | ANY,
    tools=st.lists(ITEMS, max_size=2) | ANY,
    others=st.dictionaries(
        st.sampled_from(["tool_choice", "text", "include", "metadata", "instructions"]), ANY | ITEMS
    ),
)
def test_whatever_a_body_holds_is_read_or_refused(items: Any, tools: Any, others: dict[str, Any]) -> None:
    try:
        asked = RESPONSES.parse({"model": "policy", "input": items, "tools": tools} | others, "/v1/responses")
    except Refusal:
        return
    assert all(isinstance(message["content"], str) for message in asked.messages)
