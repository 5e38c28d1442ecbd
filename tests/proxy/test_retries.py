"""Which call is a repeat, in every dialect and as the official SDKs repeat by themselves."""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

import anthropic
import openai
import pytest

from dialects import PATHS, body, post
from peers.cutter import cutter
from peers.engine import ScriptedEngine
from running_proxy import OpenSession, RunningProxy, until
from streams import hang_up, of_stream, of_whole, streaming

HOLD = {"text": "hello", "hold": True, "after": 1}
in_every_dialect = pytest.mark.parametrize("dialect", list(PATHS))
whole_and_streamed = pytest.mark.parametrize("stream", [False, True])


def said(session: OpenSession, dialect: str, document: dict[str, Any], *, stream: bool = False, **headers: str) -> str:
    answer = post(session, dialect, document, stream=stream, **headers)
    assert answer.status_code == 200, answer.text
    return (of_stream(dialect, answer.content) if stream else of_whole(dialect, answer.json())).text


def asked(text: str = "go", **fields: Any) -> dict[str, Any]:
    return body(text, max_tokens=100, **fields)


def fates(session: OpenSession) -> list[tuple[str | None, bool, int]]:
    return [
        (call.finished.finish_reason if call.finished else None, call.delivered, call.joined)
        for call in session.end()[1].calls
    ]


@in_every_dialect
@whole_and_streamed
def test_who_hangs_up_and_asks_again_joins_the_call_in_flight(
    engine: ScriptedEngine, patient: RunningProxy, dialect: str, stream: bool
) -> None:
    engine.script(HOLD)
    session = patient.open()
    hang_up(session, dialect, asked(stream=stream), engine)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(said, session, dialect, asked(), stream=stream)
        until(lambda: session.log.calls[0].joined == 1)
        engine.release()
        assert again.result() == "hello"
    assert len(engine.requests) == 1
    assert fates(session) == [("stop", True, 1)]


@in_every_dialect
@whole_and_streamed
def test_an_answer_nobody_took_is_replayed(
    engine: ScriptedEngine, patient: RunningProxy, dialect: str, stream: bool
) -> None:
    engine.script(HOLD)
    session = patient.open()
    hang_up(session, dialect, asked(stream=stream), engine)
    engine.release()
    until(lambda: session.log.calls[0].finished is not None)
    assert said(session, dialect, asked("something else"), stream=stream) == "ok"
    assert said(session, dialect, asked(), stream=stream) == "hello"
    assert len(engine.requests) == 2
    assert fates(session) == [("stop", True, 1), ("stop", True, 0)]


def test_hanging_up_while_the_answer_comes_is_no_error_in_the_log(
    proxy: RunningProxy, caplog: pytest.LogCaptureFixture
) -> None:
    session, data = proxy.open(), json.dumps(asked()).encode()
    fields = f"Host: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(data)}"
    head = f"POST {PATHS['openai_chat']} HTTP/1.1\r\n{fields}\r\n\r\n"
    address = urlsplit(proxy.url)
    for moment in range(150):
        with socket.create_connection((address.hostname, address.port)) as sock:
            sock.sendall(head.encode() + data)
            time.sleep(moment / 10_000)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert not caplog.records


@in_every_dialect
def test_a_retry_header_replays_a_delivered_answer_and_its_absence_is_a_new_sample(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    engine.script({"text": "one"}, {"text": "two"}, {"text": "three"})
    session = proxy.open()
    headers = (
        {},
        {"x_stainless_retry_count": "1"},
        {"x_stainless_retry_count": "0"},
        {"x_stainless_retry_count": "-1"},
    )
    assert [said(session, dialect, asked(), **given) for given in headers] == ["one", "one", "two", "three"]
    assert fates(session) == [("stop", True, 1), ("stop", True, 0), ("stop", True, 0)]


@in_every_dialect
def test_a_retry_header_joins_a_call_that_another_client_follows(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    """Its own first try may still hang in a connection that only the client knows to be dead."""
    engine.script(HOLD)
    session = proxy.open()
    with streaming(session, dialect, asked()) as first, ThreadPoolExecutor() as pool:
        first.until(lambda said: bool(said.text))
        again = pool.submit(said, session, dialect, asked(), stream=True, x_stainless_retry_count="1")
        until(lambda: session.log.calls[0].joined == 1)
        engine.release()
        assert (first.rest().text, again.result()) == ("hello", "hello")
    assert fates(session) == [("stop", True, 1)]


def test_a_retry_of_nothing_is_a_call(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    assert said(session, "openai_chat", asked(), x_stainless_retry_count="2") == "ok"
    assert fates(session) == [("stop", True, 0)]


@in_every_dialect
def test_equal_calls_at_once_are_as_many_samples(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    engine.script(*[{"text": f"answer {number}", "hold": True} for number in range(8)])
    session = proxy.open()
    with ThreadPoolExecutor(8) as pool:
        waiting = [pool.submit(said, session, dialect, asked()) for _ in range(8)]
        until(lambda: len(engine.requests) == 8)
        engine.release()
        answers = {each.result() for each in waiting}
    assert answers == {f"answer {number}" for number in range(8)}
    assert fates(session) == [("stop", True, 0)] * 8


def test_a_call_that_failed_is_not_repeated(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    assert post(session, "openai_chat", asked("x" * 5000)).status_code == 400
    assert post(session, "openai_chat", asked("x" * 5000), x_stainless_retry_count="1").status_code == 400
    assert said(session, "openai_chat", asked()) == "ok"
    assert len(engine.requests) == 1


# The SDKs' own


def chat(url: str, key: str) -> str:
    made = openai.OpenAI(base_url=url + "/v1", api_key=key)
    answer = made.chat.completions.create(model="policy", messages=[{"role": "user", "content": "go"}])
    return answer.choices[0].message.content or ""


def messages(url: str, key: str) -> str:
    made = anthropic.Anthropic(base_url=url, api_key=key)
    [block] = made.messages.create(model="policy", max_tokens=100, messages=[{"role": "user", "content": "go"}]).content
    return block.text


@pytest.mark.parametrize("ask", [chat, messages])
def test_an_sdk_repeats_a_dropped_call_by_itself_and_it_is_one(
    engine: ScriptedEngine, patient: RunningProxy, ask: Callable[[str, str], str]
) -> None:
    engine.script(HOLD)
    session = patient.open()
    with cutter(session.url) as wire, ThreadPoolExecutor() as pool:
        waiting = pool.submit(ask, wire.url, session.key)
        until(lambda: len(engine.requests) == 1)
        wire.cut()
        until(lambda: session.log.calls[0].joined == 1)
        engine.release()
        assert waiting.result(30) == "hello"
    assert len(engine.requests) == 1
    assert fates(session) == [("stop", True, 1)]
