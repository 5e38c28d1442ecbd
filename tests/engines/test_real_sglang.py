"""The real SGLang through /generate: a conversation, new weights in the middle of a call, limits, forms."""

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
    router,
    sequences,
    sglang,
    streamed,
)
from polar.records import LogprobMode
from running_proxy import RunningProxy, running_proxy, until, user

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
LONG = {"max_tokens": 600}
FORCED = {"ignore_eos": True}


@pytest.fixture(scope="module")
def engine(tiny: list[Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealEngine]:
    python = program("POLAR_TEST_SGLANG", "SGLang's Python")
    with sglang(python, tiny[0], tmp_path_factory.mktemp("sglang") / "log", "--dtype", "float32") as made:
        yield made


@pytest.fixture
def proxy(engine: RealEngine, tiny: list[Path], tmp_path: Path) -> Iterator[RunningProxy]:
    engine.post("/update_weights_from_disk", model_path=str(tiny[0]), weight_version="3")
    with running_proxy(tmp_path, engine.url, None, probe=True) as made:
        yield made


def running(engine: RealEngine) -> int:
    return engine.http.get("/get_load").json()[0]["num_reqs"]


def test_doctor_finds_what_is_there(engine: RealEngine, proxy: RunningProxy) -> None:
    found = doctor(engine.url, "sglang")
    assert found["takes token ids"] == (True, "/generate is used")
    assert found["logprobs as a trainer's"] == (True, "sampling_temperature")
    assert found["says its context length"] == (True, "2048")
    assert all(ok for ok, _ in found.values())
    [sound] = [check for what, check in doctor(engine.url, "sglang_chat").items() if what == "answers as it must"]
    assert (sound[0], "0.5.13" in sound[1]) == (False, True)


def test_a_conversation_continues_from_the_sampled_ids(
    engine: RealEngine, proxy: RunningProxy, request: pytest.FixtureRequest
) -> None:
    session = proxy.open(sampling={"temperature": 0.7})
    converse(session, turns=6, max_tokens=40)
    _, log = session.end()
    assert log.header.logprob_mode == LogprobMode.SAMPLING_TEMPERATURE
    assert [call.prompt.source for call in log.calls] == ["rendered"] + ["continued"] * 5
    assert {span[2] for call in log.calls for span in call.spans} == {"3"}
    built = session.build()
    assert len(built.traces) == 1
    assert built.tokens.sampled == built.tokens.trainable == sum(len(call.ids) for call in log.calls)
    told = gaps(engine, log, 0.7, request)
    assert told["float32"][0] < 1e-3


def test_recorded_ids_are_the_engines(engine: RealEngine, proxy: RunningProxy) -> None:
    session = proxy.open(sampling={"temperature": 0.0})
    converse(session, turns=2, max_tokens=30)
    _, log = session.end()
    for call in log.calls:
        asked = {
            "input_ids": log.prompt_ids(call).tolist(),
            "sampling_params": {"temperature": 0, "max_new_tokens": 30},
        }
        asked["sampling_params"]["stop_token_ids"] = call.opened.sampling["stop_token_ids"]
        assert engine.post("/generate", **asked)["output_ids"] == call.ids.tolist()


@pytest.mark.parametrize("stream", [True, False])
def test_new_weights_in_the_middle_of_a_call_are_two_spans_and_the_harness_notices_nothing(
    engine: RealEngine, proxy: RunningProxy, tiny: list[Path], stream: bool
) -> None:
    session = proxy.open(sampling=FORCED)
    messages = [user("write a lot")]
    with ThreadPoolExecutor() as pool:
        say = streamed if stream else type(session).turn
        waiting = pool.submit(say, session, messages, **LONG)
        until(lambda: running(engine) == 1, 60)
        until(lambda: engine.http.get("/get_load").json()[0]["num_tokens"] > 60, 60)
        engine.post("/pause_generation", mode="abort")
        engine.post("/update_weights_from_disk", model_path=str(tiny[1]), weight_version="4")
        engine.post("/continue_generation")
        waiting.result()
    _, log = session.end()
    [call] = log.calls
    assert (call.finished.finish_reason, len(call.ids)) == ("length", LONG["max_tokens"])
    [(start, cut, old), (again, end, new)] = call.spans
    assert (start, again, end, old, new) == (0, cut, LONG["max_tokens"], "3", "4")
    [(prompt, sampled)] = sequences(log, [call])
    before = recomputed(engine.python, tiny[0], "float32", 1.0, [(prompt, sampled[:cut])])[0]
    behind = recomputed(engine.python, tiny[1], "float32", 1.0, [(prompt + sampled[:cut], sampled[cut:])])[0]
    assert np.abs(call.logprobs - np.concatenate([before, behind])).max() < 1e-3
    assert session.build().tokens.trainable == LONG["max_tokens"]


def test_an_aborted_call_is_continued(engine: RealEngine, proxy: RunningProxy) -> None:
    session = proxy.open(sampling=FORCED)
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.turn, [user("write a lot")], **LONG)
        until(lambda: running(engine) == 1, 60)
        engine.post("/abort_request", rid="", abort_all=True)
        waiting.result()
    record, log = session.end()
    assert (len(log.calls), len(log.calls[0].ids), record.fault) == (1, LONG["max_tokens"], None)


def test_a_client_that_has_gone_leaves_nothing_running(engine: RealEngine, proxy: RunningProxy) -> None:
    check_gone(proxy.open(sampling=FORCED), lambda: running(engine))


def test_stops_lengths_and_prompts_that_do_not_fit(engine: RealEngine, proxy: RunningProxy) -> None:
    session = proxy.open(sampling=FORCED)
    check_stops(session, lambda: running(engine))
    for stopped in (call.finished for call in session.log.calls[:2]):
        assert stopped.matched in stopped.text[-11:]


@pytest.mark.parametrize("stream", [True, False])
def test_answers_are_held_to_schemas_and_tool_calls_and_not_trained(proxy: RunningProxy, stream: bool) -> None:
    check_forms(proxy.open(), stream)


def test_a_schema_that_the_engine_refuses_is_the_harnesss_own(proxy: RunningProxy) -> None:
    session = proxy.open()
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "frog"}}}
    asked = {"model": "policy", "messages": [user("x")], "response_format": form, "max_tokens": 5}
    for stream in (False, True):
        answered = session.post(asked | {"stream": stream})
        assert "frog" in answered.text
    session.turn([user("x")], max_tokens=5)
    record, _ = session.end()
    assert record.fault is None


def test_what_logprobs_are_under_a_form(proxy: RunningProxy, engine: RealEngine) -> None:
    """Why such calls are not trained: the grammar's mask is in the recorded logprobs."""
    session = proxy.open()
    form = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA}}
    session.turn([user("how is it?")], max_tokens=100, response_format=form)
    _, log = session.end()
    most, _ = gap(log.calls, engine.recomputed("float32", 1.0, sequences(log, log.calls)))
    assert most > 1
    assert log.calls[0].logprobs.max() == 0


def test_behind_the_stock_router(engine: RealEngine, proxy: RunningProxy, tmp_path: Path) -> None:
    python = program("POLAR_TEST_ROUTER", "sglang-router's Python")
    with (
        router(python, engine.url, tmp_path / "router.log") as url,
        running_proxy(tmp_path / "behind", url, None, probe=True) as behind,
    ):
        session = behind.open(sampling={"temperature": 0.7})
        converse(session, turns=4, max_tokens=30)
        _, log = session.end()
        assert [call.prompt.source for call in log.calls] == ["rendered"] + ["continued"] * 3
        assert {span[2] for call in log.calls for span in call.spans} == {"3"}
        assert gap(log.calls, engine.recomputed("float32", 0.7, sequences(log, log.calls)))[0] < 1e-3
        check_gone(behind.open(sampling=FORCED), lambda: running(engine))


def test_disjoint_streams_and_raw_logprobs_are_found_out(tiny: list[Path], tmp_path: Path) -> None:
    python = program("POLAR_TEST_SGLANG", "SGLang's Python")
    options = ("--dtype", "float32", "--incremental-streaming-output")
    with (
        sglang(python, tiny[0], tmp_path / "log", *options, SGLANG_RETURN_ORIGINAL_LOGPROB="1") as engine,
        running_proxy(tmp_path / "proxy", engine.url, None, probe=True) as proxy,
    ):
        session = proxy.open(sampling={"temperature": 0.7})
        converse(session, turns=4, max_tokens=40)
        _, log = session.end()
        assert log.header.logprob_mode == LogprobMode.RAW
        assert gap(log.calls, engine.recomputed("float32", 1.0, sequences(log, log.calls)))[0] < 1e-3
        built = session.build()
        assert built.calls.missing_logprobs == 4
        assert all(trace.response_logprobs is None for trace in built.traces)
