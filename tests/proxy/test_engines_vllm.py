"""vLLM by token ids, over both of its routes: exact ids, versions of the weights, aborts, and which route is taken."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from peers.engine import ScriptedEngine, scripted_engine
from polar.errors import EngineFault, PolarError
from polar.protocols import EngineCall, EngineFacts, Piece, Rendering
from polar.proxy import make_engine
from polar.proxy.engines.vllm import COMPLETIONS, GENERATE, VLLM
from polar.records import LogprobMode
from running_proxy import RunningProxy, running_proxy, until, user

PROMPT = np.asarray([1, 2, 3], np.int32)


@pytest.fixture(params=[GENERATE, COMPLETIONS])
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(tokenizer: Path, route: str) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer, offers=[route]) as made:
        yield made


@pytest.fixture
def proxy(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering, engine="vllm", probe=True) as made:
        yield made


@asynccontextmanager
async def probed(url: str, kind: str = "vllm") -> AsyncIterator[tuple[VLLM, EngineFacts]]:
    engine = await make_engine(kind, url)
    assert isinstance(engine, VLLM)
    try:
        yield engine, await engine.probe()
    finally:
        await engine.close()


def generate(url: str, **fields: Any) -> list[Piece]:
    async def run() -> list[Piece]:
        async with probed(url) as (engine, facts):
            assert facts.healthy, facts.problem
            call = EngineCall(rid="r1", prompt_ids=PROMPT, sampling={"max_tokens": 50}, **fields)
            return [piece async for piece in engine.generate(call)]

    return asyncio.run(run())


def last_request(engine: ScriptedEngine) -> dict[str, Any]:
    return engine.requests[-1]


@pytest.mark.parametrize("stream", [True, False])
def test_ids_and_logprobs_come_aligned(engine: ScriptedEngine, route: str, stream: bool) -> None:
    engine.script({"ids": [4, 4, 5, 9], "logprobs": [-1.0, -2.0, -3.0, -4.0], "matched": 9})
    pieces = generate(engine.url, stream=stream)
    assert np.concatenate([piece.ids for piece in pieces]).tolist() == [4, 4, 5, 9]
    assert np.concatenate([piece.logprobs for piece in pieces if len(piece.ids)]).tolist() == [-1, -2, -3, -4]
    assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
    assert pieces[-1].matched == 9
    asked = last_request(engine)
    assert asked["token_ids" if route == GENERATE else "prompt"] == PROMPT.tolist()


def test_what_vllm_would_take_from_the_models_files_is_said(engine: ScriptedEngine, route: str) -> None:
    generate(engine.url)
    asked = last_request(engine)
    sampling = asked["sampling_params"] if route == GENERATE else asked
    assert (sampling["repetition_penalty"], sampling["min_p"], sampling["logprobs"]) == (1.0, 0.0, 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("fault", "name"),
    [("500", "engine_error"), ("drop", "engine_down"), ("no_ids", "engine_lies"), ("overflow", "context")],
)
def test_faults_have_names(engine: ScriptedEngine, stream: bool, fault: str, name: str) -> None:
    engine.script({"ids": [4, 5, 9], "fault": fault, "after": 1})
    with pytest.raises(PolarError) as raised:
        generate(engine.url, stream=stream)
    assert raised.value.name == name


def test_misaligned_logprobs_are_none(engine: ScriptedEngine) -> None:
    engine.script({"ids": [4, 5, 9], "logprobs": [-0.1]})
    assert generate(engine.url, stream=False)[0].logprobs is None


@pytest.mark.parametrize("stream", [True, False])
def test_a_conversation_continues_from_the_sampled_ids(
    engine: ScriptedEngine, proxy: RunningProxy, stream: bool
) -> None:
    engine.script({"ids": [*b"hell"]}, {"text": "well"})
    session = proxy.open()
    asked = {"model": "policy", "messages": [user("hi")], "stream": stream}
    session.post(asked)
    messages = [user("hi"), session.log.calls[0].finished.message, user("again")]
    session.post(asked | {"messages": messages})
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued"]
    assert session.build().calls.drift == 0


@pytest.mark.parametrize("stream", [True, False])
def test_an_aborted_call_is_continued(engine: ScriptedEngine, proxy: RunningProxy, route: str, stream: bool) -> None:
    engine.script(
        {"text": "hello", "finish": "abort", "version": "3"}, {"text": " there", "version": "4", "logprobs": [-1.0] * 7}
    )
    session = proxy.open()
    assert session.post({"model": "policy", "messages": [user("hi")], "stream": stream}).status_code == 200
    _, log = session.end()
    [call] = log.calls
    assert call.finished.message["content"] == "hello there"
    versions = [span[2] for span in call.spans]
    assert versions == (["3", "4"] if route == GENERATE else [])
    asked = last_request(engine)
    given = asked["token_ids" if route == GENERATE else "prompt"]
    assert given == log.prompt_ids(call).tolist() + call.ids[:1].tolist()


@pytest.mark.parametrize("stream", [True, False])
def test_new_weights_within_an_answer_are_told_at_its_end(
    tokenizer: Path, tmp_path: Path, rendering: Rendering, stream: bool
) -> None:
    with (
        scripted_engine(tokenizer, offers=[GENERATE]) as engine,
        running_proxy(tmp_path, engine.url, rendering, engine="vllm", probe=True) as proxy,
    ):
        engine.script({"ids": [4, 5, 6, 9], "versions": [[0, 3, "3"], [3, 4, "4"]]})
        session = proxy.open()
        session.post({"model": "policy", "messages": [user("hi")], "stream": stream})
        _, log = session.end()
        assert log.calls[0].spans == [(0, 3, "3"), (3, 4, "4")]


def test_a_client_that_has_gone_ends_the_engines_call(engine: ScriptedEngine, proxy: RunningProxy, route: str) -> None:
    engine.script({"ids": [40, 50, 60], "hold": True, "after": 1})
    session = proxy.open()
    asked = {"model": "policy", "messages": [user("hi")], "stream": True}
    headers = {"Authorization": f"Bearer {session.key}"}
    with httpx.stream("POST", session.url + "/v1/chat/completions", json=asked, headers=headers) as answer:
        next(answer.iter_bytes())
    until(lambda: engine.aborted == [route])


def facts_of(url: str, kind: str = "vllm") -> tuple[EngineFacts, bool]:
    async def run() -> tuple[EngineFacts, bool]:
        async with probed(url, kind) as (engine, facts):
            return facts, engine.takes_ids

    return asyncio.run(run())


def test_ids_are_preferred_and_chat_can_be_chosen(engine: ScriptedEngine, route: str) -> None:
    facts, takes_ids = facts_of(engine.url)
    assert (facts.route, takes_ids, facts.healthy) == (route, True, True)
    assert facts.version == ("1" if route == GENERATE else None)
    facts, takes_ids = facts_of(engine.url, "vllm_chat")
    assert (facts.route, takes_ids, facts.healthy) == ("/v1/chat/completions", False, True)


def test_the_first_good_probe_decides_for_good(tokenizer: Path) -> None:
    async def run(url: str, other: ScriptedEngine) -> None:
        async with probed(url) as (engine, facts):
            assert facts.route == GENERATE
            engine.base_url = other.url
            facts = await engine.probe()
            assert not facts.healthy
            assert GENERATE in (facts.problem or "")
            with pytest.raises(EngineFault):
                await anext(aiter(engine.generate(EngineCall(rid="r", prompt_ids=PROMPT, sampling={}))))

    with scripted_engine(tokenizer, offers=[GENERATE]) as both, scripted_engine(tokenizer) as chat:
        asyncio.run(run(both.url, chat))


@pytest.mark.parametrize("mode", list(LogprobMode))
def test_the_distribution_of_logprobs_is_found(tokenizer: Path, route: str, mode: LogprobMode) -> None:
    with scripted_engine(tokenizer, offers=[route], mode=mode.value) as engine:
        assert facts_of(engine.url)[0].logprob_mode is mode
        assert facts_of(engine.url, "vllm_chat")[0].logprob_mode is mode
