"""A pause: nothing starts, what runs is drained or continued, streams stay alive; it ends without who ordered it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dialects import PATHS, body, post
from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy, until
from streams import of_stream, of_whole, streaming

HOLD = {"text": "hello", "hold": True, "after": 1}
in_every_dialect = pytest.mark.parametrize("dialect", list(PATHS))


def asked(text: str = "go", **fields: Any) -> dict[str, Any]:
    return body(text, max_tokens=100, **fields)


def said(session: OpenSession, *, stream: bool = False) -> str:
    answer = post(session, "openai_chat", asked(), stream=stream)
    return (of_stream("openai_chat", answer.content) if stream else of_whole("openai_chat", answer.json())).text


def resume(proxy: RunningProxy) -> None:
    proxy.on_loop(proxy.proxy.resume)


def test_a_paused_proxy_lets_no_call_through(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    assert proxy.run(proxy.proxy.pause("drain", 60.0))
    assert proxy.proxy.status()["paused"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(said, session)
        until(lambda: len(session.log.calls) == 1)
        assert engine.requests == []
        resume(proxy)
        assert waiting.result() == "ok"
    assert proxy.proxy.paused_seconds() > 0


def test_a_pause_drains_what_runs(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD)
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(said, session)
        until(lambda: len(engine.requests) == 1)
        pausing = pool.submit(proxy.run, proxy.proxy.pause("drain", 60.0))
        until(lambda: proxy.proxy.status()["paused"])
        assert proxy.proxy.status()["inflight"] == 1
        engine.release()
        assert pausing.result()
        assert waiting.result() == "hello"
    assert proxy.proxy.status() | {"base_url": ""} == {
        "paused": True,
        "inflight": 0,
        "engine": "sglang",
        "base_url": "",
    }
    assert engine.aborted == []


def test_a_pause_that_does_not_drain_resumes_by_itself(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD)
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(said, session)
        until(lambda: len(engine.requests) == 1)
        assert not proxy.run(proxy.proxy.pause("drain", 0.05))
        assert not proxy.proxy.status()["paused"]
        engine.release()
        assert waiting.result() == "hello"


def test_a_pause_ends_after_its_time_and_the_latest_decides_which(proxy: RunningProxy) -> None:
    session = proxy.open()
    for seconds in (60.0, 0.2):
        assert proxy.run(proxy.proxy.pause("drain", seconds))
    assert said(session) == "ok"
    assert not proxy.proxy.status()["paused"]
    assert 0.2 <= proxy.proxy.paused_seconds() < 60


@in_every_dialect
def test_a_stream_under_way_goes_on_behind_a_pause_and_is_kept_alive_in_it(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, dialect: str
) -> None:
    engine.script({"text": "one two", "hold": True, "after": 4}, {"text": "more"})
    with running_proxy(tmp_path, engine.url, rendering, keep_alive_seconds=0.02) as proxy:
        session = proxy.open()
        with streaming(session, dialect, asked()) as stream:
            stream.until(lambda said: said.text == "one ")
            assert proxy.run(proxy.proxy.pause("abort", 60.0))
            assert len(engine.aborted) == 1
            size = len(stream.data)
            stream.until(lambda _: len(stream.data) > size + 2)
            assert len(engine.requests) == 1
            resume(proxy)
            said = stream.rest()
        assert (said.text, said.error) == ("one more", None)
        [call] = session.end()[1].calls
    assert engine.requests[1]["input_ids"][-4:] == call.ids[:4].tolist()
    assert (call.finished.message["content"], call.delivered) == ("one more", True)


def test_a_pause_ordered_twice_cuts_a_call_once(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD, {"text": "more"})
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(said, session, stream=True)
        until(lambda: proxy.proxy.sampled(session.key) == 1)
        orders = [pool.submit(proxy.run, proxy.proxy.pause("abort", 60.0)) for _ in range(3)]
        assert all(order.result() for order in orders)
        resume(proxy)
        assert waiting.result() == "hellomore"
    assert len(engine.requests) == 2


def test_a_session_that_ends_in_a_pause_waits_for_nothing(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    assert proxy.run(proxy.proxy.pause("abort", 60.0))
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(post, session, "openai_chat", asked())
        until(lambda: len(session.log.calls) == 1)
        _, log = session.end()
        assert waiting.result().status_code == 502
    assert log.calls[0].finished.finish_reason == "abort"
    assert engine.requests == []


@pytest.mark.parametrize("relayed", [False, True])
def test_without_tokens_in_a_call_is_asked_again_or_ends_by_name(
    tmp_path: Path, tokenizer: Path, relayed: bool
) -> None:
    """What was relayed cannot be taken back; the session goes on, if its harness does."""
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, None, engine="vllm_chat", context_length=None) as proxy,
    ):
        engine.script(HOLD | {"after": 2 * relayed, "text": "some"}, {"text": "again"})
        session = proxy.open()
        with streaming(session, "openai_chat", asked()) as stream:
            stream.until(lambda said: bool(said.text) or not relayed)
            until(lambda: proxy.proxy.sampled(session.key) == 2 * relayed)
            assert proxy.run(proxy.proxy.pause("abort", 60.0))
            resume(proxy)
            first = stream.rest()
        if relayed:
            assert (first.text, first.end) == ("so", None)
            assert "aborted" in first.error
            assert said(session) == "again"
        else:
            assert (first.text, first.error) == ("again", None)
        record, log = session.end()
    assert (record.fault, record.completions) == (None, 1)
    assert log.calls[-1].delivered
    excluded = session.build().tokens.excluded
    assert excluded == ({"aborted": len(log.calls[0].ids)} if relayed else {})


def test_a_harness_that_does_not_go_on_behind_a_cut_stream_has_met_a_fault(tmp_path: Path, tokenizer: Path) -> None:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, None, engine="vllm_chat", context_length=None) as proxy,
    ):
        engine.script({"text": "some", "finish": "abort"})
        session = proxy.open()
        assert of_stream("openai_chat", post(session, "openai_chat", asked(), stream=True).content).error
        assert session.end()[0].fault == "engine_aborted"
