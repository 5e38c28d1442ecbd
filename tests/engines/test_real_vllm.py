"""The real vLLM by its token endpoint, by completions of ids, by chat, and as any server of chat completions."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from engines.real import (
    SCHEMA,
    RealEngine,
    check_forms,
    check_gone,
    check_stops,
    converse,
    doctor,
    gap,
    gaps,
    program,
    recomputed,
    sequences,
    streamed,
    vllm,
)
from polar.records import LogprobMode
from running_proxy import OpenSession, RunningProxy, running_proxy, until, user

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = {"max_tokens": 600}
FORCED = {"ignore_eos": True}
GENERATE, COMPLETIONS, CHAT = "/inference/v1/generate", "/v1/completions", "/v1/chat/completions"


@pytest.fixture(scope="module")
def engine(tiny: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    python, log = program("POLAR_TEST_VLLM", "vLLM's Python"), tmp_path_factory.mktemp("vllm") / "log"
    options = ("--dtype", "float32", "--enable-scale-out", "--logprobs-mode", "processed_logprobs")
    with vllm(python, tiny[0], log, *options) as made:
        yield made


@pytest.fixture
def proxy(engine: RealEngine, tiny: list[Path], tmp_path: Path) -> Iterator[RunningProxy]:
    load(engine, tiny[0], "3")
    with running_proxy(tmp_path, engine.url, None, engine="vllm", probe=True) as made:
        yield made


@pytest.fixture
def chat(engine: RealEngine, tiny: list[Path], tmp_path: Path) -> Iterator[RunningProxy]:
    load(engine, tiny[0], "3")
    with running_proxy(tmp_path, engine.url, None, engine="vllm_chat", probe=True) as made:
        yield made


def load(engine: RealEngine, model: Path, version: str) -> None:
    engine.post("/collective_rpc", method="reload_weights", kwargs={"weights_path": str(model)})
    engine.post("/update_weight_version", new_version=version)
    engine.post("/reset_prefix_cache")


def running(engine: RealEngine) -> int:
    lines = engine.http.get("/metrics").text.splitlines()
    return int(sum(float(line.split()[-1]) for line in lines if line.startswith("vllm:num_requests_running{")))


def aborted(engine: RealEngine, session: OpenSession) -> None:
    """A long turn that the engine drops in the middle, and that is over when this returns."""
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.turn, [user("write a lot")], **LONG)
        until(lambda: running(engine) == 1, 60)
        engine.post("/pause?mode=abort")
        engine.post("/resume")
        waiting.result()


def test_doctor_finds_what_is_there(engine: RealEngine, proxy: RunningProxy) -> None:
    found = doctor(engine.url, "vllm")
    assert found["takes token ids"] == (True, f"{GENERATE} is used")
    assert found["logprobs as a trainer's"] == (None, "processed")
    assert found["says its context length"] == (True, "2048")
    assert found["says its policy version"][0]
    assert doctor(engine.url, "vllm_chat")["takes token ids"] == (None, f"{CHAT} is used")
    assert doctor(engine.url, "openai")["returns token ids"] == (False, "no")


def test_a_conversation_continues_from_the_sampled_ids(
    engine: RealEngine, proxy: RunningProxy, request: pytest.FixtureRequest
) -> None:
    session = proxy.open(sampling={"temperature": 0.7})
    converse(session, turns=6, max_tokens=40)
    _, log = session.end()
    assert log.header.logprob_mode == LogprobMode.PROCESSED
    assert [call.prompt.source for call in log.calls] == ["rendered"] + ["continued"] * 5
    assert {span[2] for call in log.calls for span in call.spans} == {"3"}
    built = session.build()
    assert len(built.traces) == 1
    assert built.tokens.sampled == built.tokens.trainable == sum(len(call.ids) for call in log.calls)
    assert gaps(engine, log, 0.7, request)["float32"][0] < 1e-3


def test_recorded_ids_are_the_engines(engine: RealEngine, proxy: RunningProxy) -> None:
    session = proxy.open(sampling={"temperature": 0.0})
    converse(session, turns=2, max_tokens=30)
    _, log = session.end()
    for call in log.calls:
        stops = call.opened.sampling["stop_token_ids"]
        asked = {"temperature": 0, "max_tokens": 30, "stop_token_ids": stops}
        answer = engine.post(GENERATE, token_ids=log.prompt_ids(call).tolist(), sampling_params=asked)
        assert answer["choices"][0]["token_ids"] == call.ids.tolist()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("mode", ["abort", "keep"])
def test_new_weights_in_the_middle_of_a_call_are_two_spans(
    engine: RealEngine, proxy: RunningProxy, tiny: list[Path], mode: str, stream: bool
) -> None:
    session = proxy.open(sampling=FORCED)
    messages = [user("write a lot")]
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(streamed if stream else type(session).turn, session, messages, **LONG)
        until(lambda: running(engine) == 1, 60)
        engine.post(f"/pause?mode={mode}&clear_cache=false")
        load(engine, tiny[1], "4")
        engine.post("/resume")
        waiting.result()
    record, log = session.end()
    [call] = log.calls
    assert (record.fault, call.finished.finish_reason, len(call.ids)) == (None, "length", LONG["max_tokens"])
    [(start, cut, old), (again, end, new)] = call.spans
    assert (start, again, end, old, new) == (0, cut, LONG["max_tokens"], "3", "4")
    [(prompt, sampled)] = sequences(log, [call])
    before = recomputed(engine.python, tiny[0], "float32", 1.0, [(prompt, sampled[:cut])])[0]
    assert np.abs(call.logprobs[:cut] - before).max() < 1e-3
    if mode == "abort":  # kept calls go on over the old weights' keys and values
        behind = recomputed(engine.python, tiny[1], "float32", 1.0, [(prompt + sampled[:cut], sampled[cut:])])[0]
        assert np.abs(call.logprobs[cut:] - behind).max() < 1e-3


def test_a_client_that_has_gone_leaves_nothing_running(engine: RealEngine, proxy: RunningProxy) -> None:
    check_gone(proxy.open(sampling=FORCED), lambda: running(engine))


def test_stops_lengths_and_prompts_that_do_not_fit(engine: RealEngine, proxy: RunningProxy) -> None:
    session = proxy.open(sampling=FORCED)
    check_stops(session, lambda: running(engine))


@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_held_to_schemas_and_tool_calls_and_not_trained(proxy: RunningProxy, stream: bool) -> None:
    check_forms(proxy.open(), stream)


def test_what_logprobs_are_under_a_form(proxy: RunningProxy, engine: RealEngine) -> None:
    """Why such calls are not trained: the grammar's mask is in the recorded logprobs."""
    session = proxy.open()
    form = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA}}
    session.turn([user("how is it?")], max_tokens=100, response_format=form)
    _, log = session.end()
    assert gap(log.calls, engine.recomputed("float32", 1.0, sequences(log, log.calls)))[0] > 1
    assert log.calls[0].logprobs.max() == 0


def test_settings_that_it_does_not_take_are_the_harnesss_own(proxy: RunningProxy) -> None:
    session = proxy.open()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frog"}}}
    for fields in ({"response_format": form}, {"temperature": 9.0}):
        for stream in (False, True):
            answered = session.post({"model": "policy", "messages": [user("x")], "stream": stream, **fields})
            assert "the engine refuses the request" in answered.text
    session.turn([user("x")], max_tokens=5)
    assert session.end()[0].fault is None


def test_chat_gives_the_same_ids_and_tells_its_drift(
    engine: RealEngine, chat: RunningProxy, request: pytest.FixtureRequest
) -> None:
    session = chat.open(sampling={"temperature": 0.7})
    converse(session, turns=4, max_tokens=40)
    _, log = session.end()
    assert {call.prompt.source for call in log.calls} == {"engine"}
    assert gaps(engine, log, 0.7, request)["float32"][0] < 1e-3
    built = session.build()
    assert built.tokens.sampled == built.tokens.trainable == sum(len(call.ids) for call in log.calls)
    assert built.calls.forks == built.calls.drift


def test_an_aborted_chat_of_which_nothing_was_relayed_is_asked_again(engine: RealEngine, chat: RunningProxy) -> None:
    session = chat.open(sampling=FORCED)
    aborted(engine, session)
    record, log = session.end()
    assert record.fault is None
    assert [call.finished.finish_reason for call in log.calls] == ["abort", "length"]
    built = session.build()
    assert built.tokens.excluded == {"aborted": len(log.calls[0].ids)}
    assert built.tokens.trainable == LONG["max_tokens"]


def test_as_any_server_it_is_recorded_and_nothing_is_trained(engine: RealEngine, tmp_path: Path) -> None:
    with running_proxy(tmp_path, engine.url, None, engine="openai", probe=True) as proxy:
        session = proxy.open()
        converse(session, turns=3, max_tokens=20)
        record, log = session.end()
        assert (record.completions, record.fault) == (3, None)
        assert all(call.finished.message["content"] is not None for call in log.calls)
        built = session.build()
        assert (built.traces, built.tokens.sampled, built.calls.without_ids) == ([], 0, 3)
        assert 3 <= built.calls.reported_completion_tokens <= 60
        assert built.calls.reported_prompt_tokens > 60


def test_without_its_token_endpoint_completions_of_ids_are_used(tiny: list[Path], tmp_path: Path) -> None:
    python = program("POLAR_TEST_VLLM", "vLLM's Python")
    with (
        vllm(python, tiny[0], tmp_path / "log", "--dtype", "float32") as engine,
        running_proxy(tmp_path / "proxy", engine.url, None, engine="vllm", probe=True) as proxy,
    ):
        found = doctor(engine.url, "vllm")
        assert found["takes token ids"] == (True, f"{COMPLETIONS} is used")
        assert found["logprobs as a trainer's"] == (None, "raw")
        session = proxy.open()
        converse(session, turns=4, max_tokens=40)
        _, log = session.end()
        assert [call.prompt.source for call in log.calls] == ["rendered"] + ["continued"] * 3
        assert gap(log.calls, engine.recomputed("float32", 1.0, sequences(log, log.calls)))[0] < 1e-3
        assert session.build().calls.missing_logprobs == 0
        session = proxy.open(sampling={"temperature": 0.7})
        converse(session, turns=2, max_tokens=20)
        session.end()
        assert session.build().calls.missing_logprobs == 2
        check_forms(proxy.open(), stream=True)
        session = proxy.open(sampling=FORCED)
        aborted(engine, session)
        _, log = session.end()
        assert (len(log.calls), len(log.calls[0].ids)) == (1, LONG["max_tokens"])
