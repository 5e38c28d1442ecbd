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
from polar.protocols import Rendering
from running_proxy import RunningProxy, running_proxy, until

HOLD = {"text": "hello", "hold": True, "after": 1}


def body(text: str = "hi", **fields: Any) -> dict[str, Any]:
    return {"model": "policy", "messages": [{"role": "user", "content": text}]} | fields


def said(answer: httpx.Response) -> str:
    """The text of an answer, whole or streamed."""
    if answer.headers["content-type"] == "application/json":
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(choice["delta"].get("content", "") for event in events for choice in event.get("choices", []))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"ids": [4, 999_999, 9]}, "the token id 999999"),
        ({"ids": [4, -1, 9]}, "the token id -1"),
        ({"ids": [4, 10**12, 9]}, "the token id 1000000000000"),
        ({"ids": [4, 1.5, 9]}, "a token id that is no integer"),
        ({"ids": [4, "five", 9]}, "cannot be read"),
        ({"ids": [4, 9], "logprobs": [-0.1, 0.7]}, "a logprob above 0: 0.7"),
        ({"ids": [4, 9], "says": {"completion_tokens": 5}}, "the engine counts 5 sampled tokens; it has given"),
        ({"ids": [4, 9], "says": {"finish_reason": "stop"}}, "cannot be read"),
    ],
)
def test_what_no_model_can_have_sampled_is_a_lie(
    engine: ScriptedEngine, proxy: RunningProxy, step: dict[str, Any], words: str, stream: bool
) -> None:
    engine.script(step)
    session = proxy.open()
    assert words in session.post(body(stream=stream)).text
    record, log = session.end()
    assert (record.fault, record.completions, len(engine.requests)) == ("engine_lies", 0, 1)
    assert log.calls[0].finished.fault == "engine_lies"
    assert session.build().tokens.trainable == 0


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


def test_a_listener_of_ones_own_needs_no_key_and_takes_no_other(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session, other = proxy.open(), proxy.open()
    url = proxy.listen(session)
    chat = f"{url}/v1/chat/completions"

    def status(address: str, headers: dict[str, str] | dict[bytes, bytes]) -> int:
        return httpx.post(address, json=body(), headers=headers, trust_env=False).status_code

    assert status(chat, {}) == 200
    assert status(chat, {"x-goog-api-key": session.key}) == 200
    assert status(f"{url}/s/{session.key}/v1/chat/completions", {"x-api-key": "dummy"}) == 200
    assert status(chat, {"x-api-key": other.key}) == 401
    assert status(chat, {b"x-api-key": b"\xff"}) == 401
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
