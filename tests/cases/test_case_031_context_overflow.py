"""Case 31: a prompt that is too long is the dialect's own 400, which no client asks again; the session's ending is
`context`, and what came before is kept. An answer cut by length is an answer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dialects import TOOLS, body, end_of, post, text_of
from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from polar.proxy.dialects import DIALECTS
from running_proxy import OpenSession, RunningProxy, running_proxy, user

CONTEXT = 32_768
LENGTH = {
    "openai_chat": "length",
    "openai_responses": "incomplete",
    "anthropic": "max_tokens",
    "gemini": "MAX_TOKENS",
}


@pytest.fixture
def wide(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering, context_length=CONTEXT) as made:
        yield made


def says_so(dialect: str, error: dict[str, Any]) -> bool:
    """Whether it is the error by which a client of the dialect knows."""
    if dialect == "anthropic":
        return error["error"]["type"] == "invalid_request_error" and "prompt is too long" in error["error"]["message"]
    if dialect == "gemini":
        told = "input token count exceeds the maximum number of tokens" in error["error"]["message"]
        return told and error["error"]["status"] == "INVALID_ARGUMENT"
    return error["error"]["code"] == "context_length_exceeded"


def check_the_end(session: OpenSession) -> None:
    record, _ = session.end()
    assert (record.context, record.completions, record.fault) == (True, 1, None)
    [trace] = session.build().traces
    assert trace.trainable == record.sampled


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_one_token_too_many_is_refused_by_the_proxy(
    engine: ScriptedEngine, wide: RunningProxy, rendering: Rendering, dialect: str, stream: bool
) -> None:
    engine.script({"text": "yes"})
    session = wide.open()
    assert post(session, dialect, body("hi", max_tokens=9), stream=stream).status_code == 200
    shortest = len(rendering.render([user("hi"), {"role": "assistant", "content": "yes"}, user("")], None))
    answer = post(session, dialect, body("hi", "yes", "x" * (CONTEXT + 1 - shortest), max_tokens=9), stream=stream)
    assert answer.status_code == 400
    assert f"{CONTEXT + 1} tokens > {CONTEXT}" in answer.text
    assert says_so(dialect, answer.json())
    assert len(engine.requests) == 1
    check_the_end(session)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
def test_a_refusal_of_the_engine_is_the_same(
    engine: ScriptedEngine, chat_proxy: RunningProxy, dialect: str, stream: bool
) -> None:
    engine.script({"text": "yes"}, *[{"ids": [], "fault": "overflow"}] * 2)
    session = chat_proxy.open()
    assert post(session, dialect, body("hi", max_tokens=9), stream=stream).status_code == 200
    answer = post(session, dialect, body("hi", "yes", "more", max_tokens=9), stream=stream)
    assert answer.status_code == 400
    assert says_so(dialect, answer.json())
    check_the_end(session)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_an_answer_cut_by_length_is_an_answer(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering, dialect: str
) -> None:
    text = 'so <tool_call>{"name": "bash", "arguments": {"cm'
    engine.script({"text": text, "finish": "length"})
    session = proxy.open()
    answer = post(session, dialect, body("go", max_tokens=500, tools=TOOLS[dialect]))
    assert answer.status_code == 200
    assert (text_of(dialect, answer.json()), end_of(dialect, answer.json())) == (text, LENGTH[dialect])
    record, log = session.end()
    assert (record.fault, record.context) == (None, False)
    assert rendering.decode(log.calls[0].ids) == text
