"""Case 53: tokens have the version that the engine's answer tells, whatever it is when they were asked for or came; a
resumed call has two. (Over the real engines: tests/engines.)"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from running_proxy import RunningProxy, running_proxy, until, user

GENERATE = "/inference/v1/generate"


@pytest.fixture
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer, offers=[GENERATE]) as made:
        yield made


@pytest.fixture(params=["sglang", "vllm"])
def proxy(
    request: pytest.FixtureRequest, engine: ScriptedEngine, rendering: Rendering, tmp_path: Path
) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering, engine=request.param, probe=True) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
def test_new_weights_while_a_call_is_in_flight_label_only_what_they_sampled(
    engine: ScriptedEngine, proxy: RunningProxy, stream: bool
) -> None:
    engine.script({"text": "hello", "version": "3", "hold": True}, {"text": "hello", "version": "4"})
    session = proxy.open()
    before = len(engine.requests)
    asked = {"model": "policy", "messages": [user("x")], "stream": stream}
    with ThreadPoolExecutor() as pool:
        waiting: list[httpx.Response] = []
        in_flight = pool.submit(session.post, asked)
        until(lambda: len(engine.requests) == before + 1)
        waiting.append(session.post(asked | {"seed": 1}))
        engine.release()
        waiting.append(in_flight.result())
    _, log = session.end()
    assert [answer.status_code for answer in waiting] == [200, 200]
    assert [[span[2] for span in call.spans] for call in log.calls] == [["3"], ["4"]]
    spans = [trace.weight_versions for trace in session.build().traces]
    assert [[span[2] for span in trace] for trace in spans] == [["3"], ["4"]]


@pytest.mark.parametrize("stream", [True, False])
def test_a_resumed_call_has_two_spans(engine: ScriptedEngine, proxy: RunningProxy, stream: bool) -> None:
    engine.script({"ids": [4, 5, 6], "finish": "abort", "version": "3"}, {"ids": [], "finish": "abort", "version": "3"})
    engine.script({"ids": [7, 8, 9], "version": "4"})
    session = proxy.open()
    assert session.post({"model": "policy", "messages": [user("x")], "stream": stream}).status_code == 200
    _, log = session.end()
    assert log.calls[0].spans == [(0, 3, "3"), (3, 6, "4")]
    [trace] = session.build().traces
    assert trace.weight_versions == [(0, 3, "3"), (3, 6, "4")]
    assert trace.response_ids.tolist() == [4, 5, 6, 7, 8, 9]


def test_weights_that_change_within_an_answer_are_two_spans(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"ids": [4, 5, 6, 9], "versions": [[0, 2, "3"], [2, 4, "4"]]})
    session = proxy.open()
    session.post({"model": "policy", "messages": [user("x")], "stream": True})
    _, log = session.end()
    assert log.calls[0].spans == [(0, 2, "3"), (2, 4, "4")]
