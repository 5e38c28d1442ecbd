"""The official google-genai SDK against a real proxy, sync and async: answers, tools, counts, errors, retries."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from google import genai
from google.genai import errors, types
from hypothesis import given
from hypothesis import strategies as st

from peers.cutter import cutter
from peers.engine import ScriptedEngine
from polar.protocols import Delta, Rendering
from polar.proxy.canonical import Answer, Opening
from polar.proxy.dialects.gemini import Gemini
from running_proxy import OpenSession, RunningProxy, running_proxy, until, user

GOLDEN = Path(__file__).parent / "golden"
CALL = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls"}}</tool_call>'
THINK = "<think>\nhm\n</think>\n\n"
SHOWN = types.ThinkingConfig(include_thoughts=True)
BASH = {"name": "bash", "parameters": {"type": "OBJECT", "properties": {"cmd": {"type": "STRING"}}}}
TOOLS = [types.Tool(function_declarations=[types.FunctionDeclaration.model_validate(BASH)])]
PATH = "/v1beta/models/policy:"


def bash(cmd: str) -> str:
    """Runs a command."""
    return f"ran {cmd}"


def client(session: OpenSession, url: str | None = None, **options: Any) -> genai.Client:
    return genai.Client(api_key=session.key, http_options=types.HttpOptions(base_url=url or session.url, **options))


def config(**fields: Any) -> types.GenerateContentConfig:
    return types.GenerateContentConfig(**fields)


def folded(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parts of a stream put together as its SDKs do."""
    whole: list[dict[str, Any]] = []
    for part in parts:
        alike = whole and set(whole[-1]) == set(part) and "text" in part
        if alike:
            whole[-1] = whole[-1] | {"text": whole[-1]["text"] + part["text"]}
        elif part != {"text": ""}:
            whole.append(part)
    return whole


def parts_of(response: types.GenerateContentResponse) -> list[dict[str, Any]]:
    assert response.candidates is not None
    parts = response.candidates[0].content.parts
    return [json.loads(part.model_dump_json(exclude_none=True)) for part in parts]


# Answers


@pytest.mark.parametrize("shown", [True, False])
@pytest.mark.parametrize("text", ["plain", f"{THINK}a {CALL} b {CALL}", f"{THINK}so", "é🙂 <tool_call>{bad", ""])
def test_a_stream_says_what_a_whole_answer_says(
    engine: ScriptedEngine, proxy: RunningProxy, text: str, shown: bool
) -> None:
    engine.script({"text": text}, {"text": text})
    session = proxy.open()
    asked = {
        "model": "policy",
        "contents": "x",
        "config": config(tools=TOOLS, thinking_config=SHOWN if shown else None),
    }
    sdk = client(session)
    models = sdk.models
    whole, chunks = models.generate_content(**asked), list(models.generate_content_stream(**asked))
    assert without_ids(folded(part for chunk in chunks for part in parts_of(chunk))) == without_ids(
        folded(parts_of(whole))
    )
    assert ("hm" in str(parts_of(whole))) == (shown and THINK in text)
    assert chunks[-1].candidates[0].finish_reason == whole.candidates[0].finish_reason == "STOP"
    assert chunks[-1].usage_metadata == whole.usage_metadata
    usage = whole.usage_metadata
    assert usage.candidates_token_count + (usage.thoughts_token_count or 0) == len(session.log.calls[0].ids)
    assert bool(usage.thoughts_token_count) == (THINK in text)
    assert all(call.delivered for call in session.end()[1].calls)


def without_ids(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        part | {"function_call": part["function_call"] | {"id": ""}} if "function_call" in part else part
        for part in parts
    ]


words = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)


@given(st.lists(words, max_size=2), st.lists(words, max_size=4), st.lists(words, max_size=2), st.booleans())
def test_a_stream_folds_to_the_whole_answer(
    thoughts: list[str], texts: list[str], names: list[str], shown: bool
) -> None:
    calls = [
        {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps({name: at})}}
        for at, name in enumerate(names)
    ]
    deltas = [Delta(kind="reasoning", text=text) for text in thoughts]
    deltas += [Delta(kind="text", text=text) for text in texts]
    deltas += [Delta(kind="tool_call", call=call) for call in calls]
    message = {"content": "".join(texts), "reasoning_content": "".join(thoughts), "tool_calls": calls}
    opening = Opening(id="1", model="policy", created=0, echo=shown)
    answer = Answer(opening=opening, message=message, finish_reason="stop")
    for sse in (True, False):
        dialect = Gemini(sse=sse)
        encoder = dialect.encoder(opening)
        data = b"".join([encoder.start(), *map(encoder.delta, deltas), encoder.end(answer)])
        documents = events(data) if sse else json.loads(data)
        streamed = [part for document in documents for part in document["candidates"][0]["content"]["parts"]]
        whole = dialect.whole(answer)
        assert folded(streamed) == folded(whole["candidates"][0]["content"]["parts"])
        assert documents[-1]["usageMetadata"] == whole["usageMetadata"]
        assert [document["candidates"][0].get("finishReason") for document in documents[-2:]][-1] == "STOP"


def events(data: bytes) -> list[Any]:
    return [json.loads(line.removeprefix(b"data: ")) for line in data.split(b"\n\n") if line]


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("gemini_whole.json", "generateContent"),
        ("gemini_stream.sse", "streamGenerateContent?alt=sse"),
        ("gemini_stream.json", "streamGenerateContent"),
    ],
)
def test_what_goes_over_the_wire(engine: ScriptedEngine, proxy: RunningProxy, name: str, method: str) -> None:
    engine.script({"text": f"{THINK}ok {CALL}{CALL}"})
    session = proxy.open()
    body = {"contents": [{"parts": [{"text": "x"}]}], "tools": [{"functionDeclarations": [BASH]}]}
    answer = session.post(body | {"generationConfig": {"thinkingConfig": {"includeThoughts": True}}}, PATH + method)
    number = session.log.calls[0].finished.message["tool_calls"][0]["id"].removeprefix("call_").removesuffix("00")
    kind = "text/event-stream" if name.endswith("sse") else "application/json"
    assert answer.headers["content-type"].startswith(kind)
    assert answer.text.replace(number, "ID") + "\n" == (GOLDEN / name).read_text()


# Conversations


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("shown", [False, True])
def test_functions_called_by_the_sdk_itself_are_one_chain(
    engine: ScriptedEngine, proxy: RunningProxy, stream: bool, shown: bool
) -> None:
    engine.script({"text": f"{THINK}look {CALL}{CALL}"}, {"text": f"{THINK}done"}, {"text": "bye"})
    session = proxy.open()
    settings = config(tools=[bash], system_instruction="be brief", thinking_config=SHOWN if shown else None)
    sdk = client(session)
    chat = sdk.chats.create(model="policy", config=settings)
    if stream:
        said = ["".join(chunk.text or "" for chunk in chat.send_message_stream(text)) for text in ("list", "more")]
    else:
        said = [chat.send_message(text).text for text in ("list", "more")]
    assert said == (["lookdone", "bye"] if stream else ["done", "bye"])
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued", "continued"]
    assert [message["content"] for message in log.messages(log.calls[1])[-2:]] == ['{"result": "ran ls"}'] * 2
    assert len(session.build().traces) == 1


@pytest.mark.parametrize("ids", [True, False])
def test_an_async_chat_with_tools_keeps_its_chain_with_and_without_ids(
    engine: ScriptedEngine, proxy: RunningProxy, ids: bool
) -> None:
    engine.script({"text": f"{THINK}look {CALL}{CALL}"}, {"text": f"{CALL}"}, {"text": "bye"})
    session = proxy.open()

    async def story() -> str:
        sdk = client(session)
        models = sdk.aio.models
        contents: list[Any] = [types.UserContent("list")]
        while True:
            parts: list[types.Part] = []
            async for chunk in await models.generate_content_stream(
                model="policy", contents=contents, config=config(tools=TOOLS)
            ):
                parts += chunk.candidates[0].content.parts
            calls = [part.function_call for part in parts if part.function_call]
            results = []
            for at, call in enumerate(calls):
                number = call.id if ids else None
                call.id = number
                response = types.FunctionResponse(id=number, name=call.name, response={"output": f"a{at}"})
                results.append(types.Part(function_response=response))
            if not calls:
                return "".join(part.text or "" for part in parts)
            contents += [types.ModelContent(parts), types.UserContent(results)]

    assert asyncio.run(story()) == "bye"
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued", "continued"]
    results = [message for message in log.messages(log.calls[1]) if message["role"] == "tool"]
    assert [message["content"] for message in results] == ["a0", "a1"]
    asked = log.calls[0].finished.message["tool_calls"]
    if ids:
        assert [message["tool_call_id"] for message in results] == [call["id"] for call in asked]
    built = session.build()
    assert (len(built.traces), built.calls.forks) == (1, 0)


# Counts, models, errors


def test_tokens_are_counted_without_an_engine_call(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    session = proxy.open()
    assert client(session).models.count_tokens(model="policy", contents="hello").total_tokens == len(
        rendering.render([user("hello")], None)
    )
    request = {"contents": [{"parts": [{"text": "hello"}]}], "systemInstruction": {"parts": [{"text": "be brief"}]}}
    counted = session.post({"generateContentRequest": request | {"model": "models/policy"}}, PATH + "countTokens")
    messages = [{"role": "system", "content": "be brief"}, user("hello")]
    assert counted.json() == {"totalTokens": len(rendering.render(messages, None))}
    assert engine.requests == []


@pytest.mark.parametrize("version", ["v1", "v1beta", "v1alpha"])
def test_models_are_listed(proxy: RunningProxy, version: str) -> None:
    sdk = client(proxy.open(), api_version=version)
    models = sdk.models
    assert [model.name for model in models.list()] == ["models/policy", "models/policy-aux"]
    assert models.get(model="policy").name == "models/policy"
    assert models.generate_content(model="policy", contents="x").text == "ok"
    with pytest.raises(errors.ClientError) as missing:
        models.get(model="other")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")


def test_errors_have_the_dialects_shape(proxy: RunningProxy) -> None:
    session = proxy.open()
    sdk = client(session)
    models = sdk.models
    with pytest.raises(errors.ClientError, match=r"input token count exceeds .*: 5.* tokens > 4096") as overflow:
        models.generate_content(model="policy", contents="x" * 5000)
    assert (overflow.value.code, overflow.value.status) == (400, "INVALID_ARGUMENT")
    with pytest.raises(errors.ClientError, match="googleSearch"):
        models.generate_content(
            model="policy", contents="x", config=config(tools=[types.Tool(google_search=types.GoogleSearch())])
        )
    with pytest.raises(errors.ClientError) as missing:
        models.embed_content(model="policy", contents="x")
    assert (missing.value.code, missing.value.status) == (404, "NOT_FOUND")
    record, _ = session.end()
    assert (record.context, record.refused) == (True, 2)
    with pytest.raises(errors.ClientError) as ended:
        models.generate_content(model="policy", contents="x")
    assert (ended.value.code, ended.value.status) == (401, "UNAUTHENTICATED")


def test_an_engine_that_dies_half_way_ends_the_stream_in_its_own_error(
    engine: ScriptedEngine, proxy: RunningProxy
) -> None:
    step = {"text": "one two", "after": 2, "fault": "error_event"}
    engine.script(step, step)
    session, other = proxy.open(), proxy.open()
    sdk, said = client(session), ""
    with pytest.raises(errors.ClientError, match="scripted failure") as died:  # noqa: PT012
        for chunk in sdk.models.generate_content_stream(model="policy", contents="x"):
            said += chunk.text or ""
    assert (said, died.value.status) == ("on", "FAILED_PRECONDITION")
    array = other.post({"contents": [{"parts": [{"text": "x"}]}]}, PATH + "streamGenerateContent").json()
    assert [next(iter(document)) for document in array] == ["candidates", "candidates", "error"]


def test_signs_of_life_disturb_neither_the_sdk_nor_an_array(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering
) -> None:
    step = {"text": "one", "pace": 0.2}
    engine.script(step, step, step)
    with running_proxy(tmp_path, engine.url, rendering, keep_alive_seconds=0.02) as proxy:
        session = proxy.open()
        body = {"contents": [{"parts": [{"text": "x"}]}]}
        assert "}\n\n\n" in session.post(body, PATH + "streamGenerateContent?alt=sse").text
        assert len(session.post(body, PATH + "streamGenerateContent").json()) == 4
        sdk = client(session)
        chunks = sdk.models.generate_content_stream(model="policy", contents="x")
        assert "".join(chunk.text or "" for chunk in chunks) == "one"


# Retries


@pytest.fixture
def patient(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering, grace_seconds=30.0) as made:
        yield made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_the_sdks_own_retry_of_a_dropped_answer_is_one_engine_call(
    engine: ScriptedEngine, patient: RunningProxy, way: str, stream: bool
) -> None:
    """It says nothing of being a retry: same bytes, no header."""
    engine.script({"text": "hello", "hold": True})
    session = patient.open()
    retry = types.HttpRetryOptions(attempts=9, initial_delay=0.05, max_delay=0.1, jitter=0.0)
    asked = {"model": "policy", "contents": "go"}

    def sync(models: Any) -> str:
        if stream:
            return "".join(chunk.text or "" for chunk in models.generate_content_stream(**asked))
        return models.generate_content(**asked).text

    async def asynchronous(models: Any) -> str:
        if stream:
            return "".join([chunk.text or "" async for chunk in await models.generate_content_stream(**asked)])
        return (await models.generate_content(**asked)).text

    with cutter(session.url) as wire, ThreadPoolExecutor() as pool:
        made = client(session, wire.url, retry_options=retry, timeout=None if way == "async" else 700)
        said = (
            pool.submit(asyncio.run, asynchronous(made.aio.models))
            if way == "async"
            else pool.submit(sync, made.models)
        )
        until(lambda: len(engine.requests) == 1)
        if way == "async":
            wire.cut()  # the sync client asks again after a timeout, and not after a dropped connection
        until(lambda: session.log.calls[0].joined > 0)
        engine.release()
        assert said.result(30) == "hello"
    assert len(engine.requests) == 1
    [call] = session.end()[1].calls
    assert call.delivered
