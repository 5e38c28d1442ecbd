"""Streams in all four dialects: real, equal to whole answers, kept alive, and ended by name whatever happens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dialects import PATHS, SETTINGS, STOP, TOOLS, body, post, thought_of
from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy, until
from streams import of_stream, of_whole, streaming

DIALECTS = list(PATHS)
CALL = '<tool_call>{"name": "bash", "arguments": {"cmd": "ls é"}}</tool_call>'
in_every_dialect = pytest.mark.parametrize("dialect", DIALECTS)


def asked(dialect: str, text: str = "go", **fields: Any) -> dict[str, Any]:
    return body(text, max_tokens=900, tools=TOOLS[dialect], **SETTINGS) | fields


# What is streamed


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, rendering: Rendering
) -> Iterator[tuple[ScriptedEngine, OpenSession]]:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path_factory.mktemp("house"), engine.url, rendering) as proxy,
    ):
        yield engine, proxy.open()


CHARACTERS = st.characters(codec="utf-8", exclude_characters="\r")
PARTS = st.one_of(
    st.text(CHARACTERS, max_size=6),
    st.sampled_from(
        ["hello", " \n", "水🙂", "e\u0301", "STO", STOP, CALL, "<tool_call>{bad", "<tool", "</think>", "<"]
    ),
)


@in_every_dialect
@settings(max_examples=25)
@given(thoughts=st.none() | st.text(CHARACTERS, max_size=6), parts=st.lists(PARTS, max_size=5), cut=st.booleans())
def test_a_stream_says_what_a_whole_answer_says(
    house: tuple[ScriptedEngine, OpenSession], dialect: str, thoughts: str | None, parts: list[str], cut: bool
) -> None:
    """Bytes are tokens here: every character of several bytes comes in pieces."""
    engine, session = house
    text = ("" if thoughts is None else f"<think>{thoughts}</think>\n") + "".join(parts)
    before, stop, _ = text.partition(STOP)
    step: dict[str, Any] = {"text": before + stop} | ({"matched": STOP} if stop else {})
    step |= {"finish": "length"} if cut and not stop else {}
    engine.script(step, step)
    whole = of_whole(dialect, post(session, dialect, asked(dialect)).json())
    streamed = of_stream(dialect, post(session, dialect, asked(dialect), stream=True).content)
    assert streamed == whole
    assert whole.end is not None


@in_every_dialect
def test_text_is_relayed_at_once_and_a_tool_call_when_it_is_whole(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    engine.script({"text": f"look {CALL}", "hold": True, "after": 20})
    session = proxy.open()
    with streaming(session, dialect, asked(dialect)) as stream:
        assert stream.until(lambda said: said.text == "look").calls == []
        until(lambda: proxy.proxy.sampled(session.key) == 20)
        engine.release()
        said = stream.rest()
    assert (said.text, said.order) == ("look", ["text", "call"])
    assert [name for name, _ in said.calls] == ["bash"]
    assert session.log.calls[0].delivered


@in_every_dialect
def test_thoughts_are_relayed_while_they_come_and_are_counted(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering, dialect: str
) -> None:
    step = {"text": "<think>\nhm, so it is</think>\n\nyes"}
    engine.script(step | {"hold": True, "after": 8}, step)
    session = proxy.open()
    document = asked(dialect, stream_options={"include_usage": True})
    with streaming(session, dialect, document) as stream:
        told = stream.until(lambda said: len(said.reasoning) >= 4)
        assert ("hm, so it is".startswith(told.reasoning), len(told.reasoning) < 12, told.text) == (True, True, "")
        engine.release()
        said = stream.rest()
    assert (said.reasoning, said.text, said.order) == ("hm, so it is", "yes", ["reasoning", "text"])
    counted = thought_of(dialect, post(session, dialect, document).json())
    thoughts = rendering.decode(session.log.calls[1].ids[:counted])
    assert (thoughts.count("</think>"), thoughts[-8:]) == (1, "</think>")
    events = [line[6:] for line in stream.data.split(b"\n") if line.startswith(b"data: {")]
    last = [json.loads(event) for event in events if b"_tokens_details" in event or b"thoughtsTokenCount" in event][-1]
    assert thought_of(dialect, last) == counted


@in_every_dialect
def test_thoughts_of_an_engine_that_parses_them_itself_come_before_the_text(
    tmp_path: Path, tokenizer: Path, dialect: str
) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": '{"cmd": "ls"}'}}
    deltas = [
        {"reasoning": "h"},
        {"reasoning_content": "m"},
        {"content": "s"},
        {"content": "o"},
        {"tool_calls": [call]},
    ]
    step = {"text": "12345", "deltas": deltas, "hold": True, "after": 2}
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, None, engine="openai", context_length=None) as proxy,
    ):
        engine.script(step)
        session = proxy.open()
        with streaming(session, dialect, asked(dialect)) as stream:
            stream.until(lambda said: said.reasoning == "hm")
            engine.release()
            said = stream.rest()
        assert (said.reasoning, said.text, said.order) == ("hm", "so", ["reasoning", "text", "call"])
        [finished] = session.log.calls
        assert finished.finished.message["reasoning_content"] == "hm"


# Silence


@in_every_dialect
def test_a_silent_stream_says_something_and_stays_whole(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, dialect: str
) -> None:
    step = {"text": "late", "hold": True}
    with running_proxy(tmp_path, engine.url, rendering, keep_alive_seconds=0.02) as proxy:
        for before in (0, 2):
            engine.script(step | {"after": before})
            session = proxy.open()
            with streaming(session, dialect, asked(dialect)) as stream:
                stream.until(lambda said, before=before: len(said.text) == before)
                size = len(stream.data)
                stream.until(lambda said, stream=stream, size=size: len(stream.data) > size + 2)
                assert not stream.said.end
                engine.release()
                assert stream.rest().text == "late"
            assert session.end()[1].calls[0].delivered


# Clients that go


@in_every_dialect
def test_a_client_that_comes_back_in_time_has_the_answer_from_its_start(
    engine: ScriptedEngine, patient: RunningProxy, dialect: str
) -> None:
    engine.script({"text": f"hello {CALL}", "hold": True, "after": 12})
    session = patient.open()
    with streaming(session, dialect, asked(dialect)) as stream:
        stream.until(lambda said: said.text == "hello")
    with streaming(session, dialect, asked(dialect)) as stream:
        stream.until(lambda said: said.text == "hello")
        engine.release()
        said = stream.rest()
    assert (said.text, said.error, len(said.calls)) == ("hello", None, 1)
    assert len(engine.requests) == 1
    [call] = session.end()[1].calls
    assert (call.joined, call.delivered) == (1, True)


@in_every_dialect
def test_a_client_that_does_not_come_back_costs_the_engine_a_grace(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    engine.script({"text": "hello you", "hold": True, "after": 3}, {"text": "again"})
    session = proxy.open()
    with streaming(session, dialect, asked(dialect)) as stream:
        stream.until(lambda said: said.text.startswith("hello"))
    until(lambda: len(engine.aborted) == 1)
    until(lambda: session.log.calls[0].finished is not None)
    with streaming(session, dialect, asked(dialect)) as stream:
        assert stream.rest().text == "again"
    first, second = session.end()[1].calls
    assert (first.finished.finish_reason, first.delivered, second.delivered) == ("abort", False, True)
    assert session.build().tokens.excluded == {"aborted": len(first.ids)}


@in_every_dialect
def test_an_answer_that_nobody_took_is_undelivered(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    engine.script({"text": "hello", "hold": True, "after": 1})
    session = proxy.open()
    with streaming(session, dialect, asked(dialect)) as stream:
        stream.until(lambda said: bool(said.text))
    engine.release()
    until(lambda: session.log.calls[0].finished is not None)
    record, log = session.end()
    assert (log.calls[0].finished.finish_reason, log.calls[0].delivered) == ("stop", False)
    assert engine.aborted == []
    assert session.build().tokens.excluded == {"undelivered": record.sampled}


@in_every_dialect
def test_the_end_of_the_session_ends_a_stream_by_name(
    engine: ScriptedEngine, patient: RunningProxy, dialect: str
) -> None:
    engine.script({"text": "hello", "hold": True, "after": 1})
    session = patient.open()
    with streaming(session, dialect, asked(dialect)) as stream, ThreadPoolExecutor() as pool:
        stream.until(lambda said: bool(said.text))
        ending = pool.submit(session.end)
        said = stream.rest()
        record, log = ending.result(30)
    assert said.end is None
    assert "cut off" in said.error
    assert len(engine.aborted) == 1
    assert (record.fault, log.calls[0].finished.finish_reason) == (None, "abort")


# Engines that die


@in_every_dialect
@pytest.mark.parametrize("fault", ["drop", "error_event"])
def test_an_engine_that_dies_half_way_ends_the_stream_by_name(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str, fault: str
) -> None:
    engine.script({"text": "<think>hm</think>hello you", "fault": fault, "hold": True, "after": 6})
    session = proxy.open()
    with streaming(session, dialect, asked(dialect)) as stream:
        stream.until(lambda said: bool(said.text))
        engine.release()
        said = stream.rest()
    assert said.end is None
    assert said.error is not None
    assert (said.reasoning, said.order) == ("hm", ["reasoning", "text"])
    record, log = session.end()
    assert record.fault == ("engine_down" if fault == "drop" else "engine_error")
    assert (log.calls[0].finished.finish_reason, log.calls[0].delivered) == ("error", False)
    assert session.build().tokens.excluded == {"aborted": len(log.calls[0].ids)}


@in_every_dialect
def test_an_engine_that_dies_before_a_word_is_an_error_with_a_status(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    engine.script(*[{"ids": [4], "fault": "500"}] * 4)
    session = proxy.open()
    answer = post(session, dialect, asked(dialect), stream=True)
    assert answer.status_code >= 400
    assert "scripted failure" in json.dumps(answer.json())
    assert session.end()[0].fault == "engine_error"
