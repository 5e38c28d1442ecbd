"""Retries, hang-ups, limits, pauses and faults, over raw HTTP: what the harness sees, and what the log says of it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

import peers.engine
from peers.engine import ScriptedEngine, scripted_engine
from polar.errors import TaskFault
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy, until

HOLD = {"text": "hello", "hold": True, "after": 1}


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}]} | fields


def said(answer: httpx.Response) -> str:
    """The text of an answer, whole or streamed."""
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", []))


def hang_up(session: OpenSession, document: dict[str, Any], engine: ScriptedEngine) -> None:
    """Sends a request, waits until the engine has it, and closes the socket."""
    before = len(engine.requests)
    data = json.dumps(document).encode()
    host, _, port = session.url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port))) as sock:
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\n"
        sock.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: len(engine.requests) > before)


@pytest.fixture
def patient(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering, grace_seconds=30.0) as made:
        yield made


def fates(session: OpenSession) -> list[tuple[str | None, bool, int]]:
    return [
        (call.finished.finish_reason if call.finished else None, call.delivered, call.joined)
        for call in session.end()[1].calls
    ]


def test_who_hangs_up_and_asks_again_joins_the_call_in_flight(engine: ScriptedEngine, patient: RunningProxy) -> None:
    engine.script(HOLD)
    session = patient.open()
    hang_up(session, body(), engine)
    with ThreadPoolExecutor() as pool:
        again = pool.submit(session.post, body())
        until(lambda: session.log.calls[0].joined == 1)
        engine.release()
        assert said(again.result()) == "hello"
    assert len(engine.requests) == 1
    assert fates(session) == [("stop", True, 1)]


def test_an_answer_nobody_took_is_replayed(engine: ScriptedEngine, patient: RunningProxy) -> None:
    engine.script(HOLD)
    session = patient.open()
    hang_up(session, body(stream=True), engine)
    engine.release()
    until(lambda: session.log.calls[0].finished is not None)
    assert said(session.post(body(stream=True, model="other"))) == "ok"
    assert said(session.post(body(stream=True))) == "hello"
    assert len(engine.requests) == 2
    assert fates(session) == [("stop", True, 1), ("stop", True, 0)]


def test_a_retry_header_replays_a_delivered_answer_and_its_absence_is_a_new_sample(
    engine: ScriptedEngine, proxy: RunningProxy
) -> None:
    engine.script({"text": "one"}, {"text": "two"})
    session = proxy.open()
    headers = ({}, {"x_stainless_retry_count": "1"}, {"x_stainless_retry_count": "0"})
    assert [said(session.post(body(), **given)) for given in headers] == ["one", "one", "two"]
    assert fates(session) == [("stop", True, 1), ("stop", True, 0)]


def test_an_equal_call_beside_a_live_one_is_a_new_sample(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD, {"text": "two"})
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        live = pool.submit(session.post, body())
        until(lambda: len(engine.requests) == 1)
        assert said(session.post(body())) == "two"
        engine.release()
        assert said(live.result()) == "hello"
    assert fates(session) == [("stop", True, 0), ("stop", True, 0)]


def test_a_call_nobody_waits_for_is_aborted_after_the_grace(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD)
    session = proxy.open()
    hang_up(session, body(stream=True), engine)
    until(lambda: len(engine.aborted) == 1)
    until(lambda: session.log.calls[0].finished is not None)
    [call] = session.log.calls
    assert call.finished.finish_reason == "abort"
    assert len(call.ids) == 1
    assert session.build().tokens.excluded == {"aborted": 1}


def test_the_end_of_the_session_aborts_at_once(engine: ScriptedEngine, patient: RunningProxy) -> None:
    engine.script(HOLD)
    session = patient.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.post, body())
        until(lambda: len(engine.requests) == 1)
        record, log = session.end()
        assert waiting.result().status_code == 502
    assert log.calls[0].finished.finish_reason == "abort"
    assert (record.completions, record.fault) == (0, None)
    assert len(engine.aborted) == 1
    assert session.post(body()).status_code == 401


@contextlib.contextmanager
def engine_process(tokenizer: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    """The scripted engine as a process of its own; listening when this is entered."""
    command = [sys.executable, "-m", "peers.engine", "--tokenizer", str(tokenizer), "--port", str(port)]
    tests = Path(peers.engine.__file__).parents[1]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tests) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield process
        finally:
            process.kill()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def test_an_engine_that_comes_up_late_is_waited_for(tmp_path: Path, tokenizer: Path, rendering: Rendering) -> None:
    port = free_port()
    with (
        running_proxy(tmp_path, f"http://127.0.0.1:{port}", rendering, backoff_seconds=1.0) as proxy,
        ThreadPoolExecutor() as pool,
    ):
        session = proxy.open()
        waiting = pool.submit(session.post, body())
        until(lambda: len(session.log.calls) == 1)
        with engine_process(tokenizer, port):
            assert said(waiting.result()) == "ok"
        assert session.end()[0].fault is None


@pytest.mark.slow
def test_an_engine_that_hangs_whole_is_found(tmp_path: Path, tokenizer: Path, rendering: Rendering) -> None:
    port = free_port()
    with (
        engine_process(tokenizer, port) as process,
        running_proxy(tmp_path, f"http://127.0.0.1:{port}", rendering) as proxy,
    ):
        process.send_signal(signal.SIGSTOP)
        session = proxy.open()
        assert "/health" in session.post(body()).json()["error"]["message"]
        assert session.end()[0].fault == "engine_timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_before_anything_was_relayed_is_healed(
    engine: ScriptedEngine, proxy: RunningProxy, stream: bool
) -> None:
    engine.script({"ids": [], "fault": "500"}, {"text": "", "fault": "drop"}, {"text": "healed"})
    session = proxy.open()
    assert said(session.post(body(stream=stream))) == "healed"
    record, log = session.end()
    assert (record.fault, record.completions) == (None, 1)
    assert len(log.calls) == 1


def test_a_fault_that_does_not_heal_is_the_sessions(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(*[{"ids": [4], "fault": "500"}] * 4)
    session = proxy.open()
    answer = session.post(body())
    assert answer.status_code == 502
    assert answer.headers["x-should-retry"] == "false"
    assert "scripted failure" in answer.json()["error"]["message"]
    assert session.post(body()).status_code == 502
    assert len(engine.requests) == 4
    record, log = session.end()
    assert (record.fault, record.completions) == ("engine_error", 0)
    assert "scripted failure" in record.fault_message
    assert log.calls[0].finished.fault == "engine_error"


def test_an_abort_is_continued_from_what_was_sampled(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    for stream in (True, False):
        engine.script(
            {"text": "one ", "finish": "abort", "version": "3"}, {"ids": [], "finish": "abort", "version": "3"}
        )
        engine.script({"text": "two", "version": "4"})
        session = proxy.open()
        answer = session.post(body(stream=stream, max_tokens=30))
        assert said(answer) == "one two"
        *_, first, _, second = engine.requests
        [call] = session.end()[1].calls
        assert second["input_ids"] == first["input_ids"] + call.ids[:4].tolist()
        assert second["sampling_params"]["max_new_tokens"] == 26
        assert call.spans == [(0, 4, "3"), (4, 8, "4")]
        assert call.finished.message["content"] == "one two"


def test_a_log_that_takes_no_more_is_the_sessions_fault(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD)
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.post, body())
        until(lambda: len(engine.requests) == 1)
        session.lose_log()
        engine.release()
        assert waiting.result().status_code == 500
    assert session.end()[0].fault == "log_sealed"


def test_a_paused_proxy_lets_no_call_through(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    assert proxy.run(proxy.proxy.pause("drain", 60.0))
    assert proxy.proxy.status()["paused"]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.post, body())
        until(lambda: len(session.log.calls) == 1)
        assert engine.requests == []
        proxy.run(on_loop(proxy.proxy.resume))
        assert waiting.result().status_code == 200
    assert proxy.proxy.paused_seconds() > 0


def test_a_pause_that_does_not_drain_resumes_by_itself(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD)
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.post, body())
        until(lambda: len(engine.requests) == 1)
        assert not proxy.run(proxy.proxy.pause("drain", 0.05))
        assert not proxy.proxy.status()["paused"]
        engine.release()
        assert waiting.result().status_code == 200


def test_a_pause_ends_after_its_time_and_the_latest_decides_which(proxy: RunningProxy) -> None:
    session = proxy.open()
    for seconds in (60.0, 0.2):
        assert proxy.run(proxy.proxy.pause("drain", seconds))
    assert session.post(body()).status_code == 200
    assert not proxy.proxy.status()["paused"]
    assert 0.2 <= proxy.proxy.paused_seconds() < 60


def test_a_pause_that_aborts_continues_the_call_afterwards(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": "one two", "hold": True, "after": 4}, {"text": "more"})
    session = proxy.open()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.post, body(stream=True))
        until(lambda: proxy.proxy.sampled(session.key) == 4)
        assert proxy.run(proxy.proxy.pause("abort", 5.0))
        proxy.run(on_loop(proxy.proxy.resume))
        assert said(waiting.result()) == "one more"
    [call] = session.end()[1].calls
    assert engine.requests[1]["input_ids"][-4:] == call.ids[:4].tolist()
    assert call.finished.message["content"] == "one more"


async def on_loop(function: Any) -> None:
    function()


@pytest.mark.parametrize(
    ("limits", "name"), [({"turns": 1}, "turns"), ({"tokens": 3}, "tokens"), ({"seconds": 1e-9}, "seconds")]
)
def test_limits_refuse_cleanly(engine: ScriptedEngine, proxy: RunningProxy, limits: Any, name: str) -> None:
    engine.script({"text": "abc"})
    session = proxy.open(limits=limits)
    answers = [session.post(body()), session.post(body())]
    assert answers[-1].status_code == 403
    assert name in answers[-1].json()["error"]["message"]
    record, log = session.end()
    assert record.limit == name
    assert log.refusals[-1].reason == "limit"
    assert proxy.open(limits=limits).post(body(model="policy-aux")).status_code in (200, 403)


def test_the_token_limit_bounds_the_answer(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": "abcdef"})
    session = proxy.open(limits={"tokens": 3})
    assert session.post(body()).json()["choices"][0]["finish_reason"] == "length"
    assert session.end()[0].limit == "tokens"


def test_calls_at_once_are_limited(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script(HOLD)
    session = proxy.open(limits={"concurrent_calls": 1})
    with ThreadPoolExecutor() as pool:
        live = pool.submit(session.post, body())
        until(lambda: len(engine.requests) == 1)
        assert session.post(body("other")).status_code == 429
        engine.release()
        assert live.result().status_code == 200
    assert session.end()[0].limit is None


def test_a_cost_limit_needs_prices(
    tmp_path: Path, engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    with pytest.raises(TaskFault, match="price"):
        proxy.open(limits={"cost": 1.0})
    with running_proxy(tmp_path, engine.url, rendering, prices={"input": 0.0, "output": 1e6}) as priced:
        session = priced.open(limits={"cost": 2.5})
        assert [session.post(body()).status_code for _ in range(2)] == [200, 403]
        assert session.end()[0].limit == "cost"


def test_auxiliary_calls_are_known_by_their_name(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open(limits={"turns": 1})
    session.post(body())
    assert session.post(body(model="policy-aux")).status_code == 200
    record, log = session.end()
    assert [call.opened.auxiliary for call in log.calls] == [False, True]
    assert record.completions == 2
    assert session.build().tokens.excluded == {"auxiliary_call": len(log.calls[1].ids)}


def test_the_tasks_sampling_wins_and_is_recorded(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    forced = {"temperature": 0.7, "max_tokens": 40, "seed": 1}
    session = proxy.open(sampling=forced)
    asked = {"temperature": 0.0, "max_tokens": 100, "top_p": 0.5, "seed": 5}
    session.post(body(**asked))
    proxy.open(sampling=forced, session_index=1).post(body(**asked))
    first, other = (request["sampling_params"] for request in engine.requests)
    assert (first["temperature"], first["max_new_tokens"], first["top_p"]) == (0.7, 40, 0.5)
    assert first["sampling_seed"] not in (1, 5, other["sampling_seed"])
    [call] = session.end()[1].calls
    assert call.opened.sampling["seed"] == first["sampling_seed"]
    assert call.opened.sampling["temperature"] == 0.7


def test_a_listener_of_ones_own_needs_no_key_and_takes_no_other(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session, other = proxy.open(), proxy.open()
    url = proxy.listen(session)
    chat = f"{url}/v1/chat/completions"

    def status(address: str, headers: dict[str, str]) -> int:
        return httpx.post(address, json=body(), headers=headers, trust_env=False).status_code

    assert status(chat, {}) == 200
    assert status(chat, {"x-goog-api-key": session.key}) == 200
    assert status(f"{url}/s/{session.key}/v1/chat/completions", {"x-api-key": "dummy"}) == 200
    assert status(chat, {"x-api-key": other.key}) == 401
    assert status(f"{session.url}/v1/chat/completions", {}) == 401
    assert httpx.head(url, trust_env=False).status_code == 200
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 404
    assert len(session.end()[1].calls) == 3
    with pytest.raises(httpx.ConnectError):
        httpx.get(url, trust_env=False)


def test_bad_bodies_are_named(proxy: RunningProxy) -> None:
    session = proxy.open()
    headers = {"x-api-key": session.key}
    for content, word in [
        (b"{", "JSON"),
        (b"[]", "object"),
        (b"{}", "messages"),
        (json.dumps(body(n=2)).encode(), "n:"),
        (json.dumps(body(temperature="hot")).encode(), "temperature"),
        (json.dumps(body(temperature=-1)).encode(), "temperature"),
        (json.dumps(body(max_tokens=0)).encode(), "max_tokens"),
        (json.dumps(body() | {"messages": [{"role": "alien"}]}).encode(), "messages.0.role"),
    ]:
        answer = httpx.post(session.url + "/v1/chat/completions", content=content, headers=headers, trust_env=False)
        assert answer.status_code == 400
        assert word in answer.json()["error"]["message"]
    assert session.end()[0].refused == 8


def test_a_surrogate_cut_in_half_is_no_reason_to_fail(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    content = rb'{"model": "policy", "messages": [{"role": "user", "content": "half \ud83d"}]}'
    answer = httpx.post(
        session.url + "/v1/chat/completions", content=content, headers={"x-api-key": session.key}, trust_env=False
    )
    assert answer.status_code == 200
    assert session.end()[1].calls[0].opened.messages[0]["content"] == "half ?"


def test_one_slow_engine_stalls_nobody_else(tokenizer: Path, proxy: RunningProxy, engine: ScriptedEngine) -> None:
    engine.script(HOLD)
    slow, fast = proxy.open(), proxy.open()
    thread = threading.Thread(target=slow.post, args=(body(),))
    thread.start()
    until(lambda: len(engine.requests) == 1)
    assert fast.post(body("x" * 300_000)).status_code == 400
    assert fast.post(body()).status_code == 200
    engine.release()
    thread.join()


def test_an_engine_that_renders_itself_is_recorded_with_its_prompt(
    tmp_path: Path, tokenizer: Path, rendering: Rendering
) -> None:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, None, engine="vllm", context_length=None) as proxy,
    ):
        session = proxy.open()
        document = body()
        for stream in (True, False):
            engine.script({"text": "hello"})
            answer = session.post(document | {"stream": stream})
            assert said(answer) == "hello"
            document["messages"] += [{"role": "assistant", "content": "hello"}, {"role": "user", "content": "go on"}]
        _, log = session.end()
        assert [call.prompt.source for call in log.calls] == ["engine", "engine"]
        one, two = log.calls
        assert two.prompt.keep == one.length
        assert rendering.decode(log.prompt_ids(two)).count("<|im_end|>") == 3
        assert len(session.build().traces) == 1


def test_an_engine_without_ids_is_recorded_without(tmp_path: Path, tokenizer: Path) -> None:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path, engine.url, None, engine="openai", context_length=None) as proxy,
    ):
        session = proxy.open()
        usage = session.post(body()).json()["usage"]
        assert usage["completion_tokens"] == 3
        record, log = session.end()
        assert (record.completions, record.sampled) == (1, 0)
        assert log.calls[0].finished.usage == {"prompt_tokens": usage["prompt_tokens"], "completion_tokens": 3}
