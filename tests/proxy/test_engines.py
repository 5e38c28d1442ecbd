"""Each engine class over HTTP: what an answer is made into, and every fault by its name."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.engine import ScriptedEngine, scripted_engine
from polar.errors import ConfigError, EngineFault, PolarError, PolicyFault, TaskFault
from polar.protocols import EngineCall, EngineFacts, Piece
from polar.proxy import make_engine
from polar.proxy.engines.probing import mode_of
from polar.records import LogprobMode
from running_proxy import running_proxy, until

PROMPT = np.asarray([1, 2, 3], np.int32)
MESSAGES = [{"role": "user", "content": "hello there"}]


def generate(kind: str, url: str, *, stream: bool = True, patience: float = 300.0, **fields: Any) -> list[Piece]:
    async def run() -> list[Piece]:
        engine = await make_engine(kind, url, patience)
        asked = {"prompt_ids": PROMPT} if engine.takes_ids else {"messages": MESSAGES}
        call = EngineCall(rid="r1", stream=stream, sampling={"max_tokens": 50}, **(asked | fields))
        try:
            return [piece async for piece in engine.generate(call)]
        finally:
            await engine.close()

    return asyncio.run(run())


def probe(kind: str, url: str) -> EngineFacts:
    async def run() -> EngineFacts:
        engine = await make_engine(kind, url)
        try:
            return await engine.probe()
        finally:
            await engine.close()

    return asyncio.run(run())


def ids(pieces: list[Piece]) -> list[int]:
    return [number for piece in pieces for number in piece.ids.tolist()]


@pytest.fixture
def incremental(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer, incremental=True) as made:
        yield made


def test_cumulative_and_disjoint_streams_and_whole_answers_are_one(
    engine: ScriptedEngine, incremental: ScriptedEngine
) -> None:
    step = {"ids": [4, 4, 5, 9], "logprobs": [-1.0, -2.0, -3.0, -4.0], "version": "3", "matched": 9}
    found = []
    for peer, stream in ((engine, True), (incremental, True), (engine, False)):
        peer.script(step)
        pieces = generate("sglang", peer.url, stream=stream)
        assert np.concatenate([piece.logprobs for piece in pieces]).tolist() == step["logprobs"]
        assert {piece.version for piece in pieces} == {"3"}
        assert [piece.finish_reason for piece in pieces if piece.finish_reason] == ["stop"]
        assert pieces[-1].matched == 9
        found.append(ids(pieces))
    assert found == [[4, 4, 5, 9]] * 3
    assert engine.requests[0]["input_ids"] == PROMPT.tolist()


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["sglang", "vllm"])
@pytest.mark.parametrize(
    ("fault", "name"),
    [
        ("500", "engine_error"),
        ("html", "engine_error"),
        ("drop", "engine_down"),
        ("no_ids", "engine_lies"),
        ("overflow", "context"),
    ],
)
def test_faults_have_names(engine: ScriptedEngine, kind: str, stream: bool, fault: str, name: str) -> None:
    step = {"ids": [4, 5, 9], "fault": fault, "after": 1}
    engine.script(step, step)
    with pytest.raises(PolarError) as raised:
        generate(kind, engine.url, stream=stream)
    assert raised.value.name == name
    assert isinstance(raised.value, PolicyFault if name == "context" else EngineFault)


def test_an_error_event_is_a_fault(engine: ScriptedEngine) -> None:
    engine.script({"ids": [4, 5], "fault": "error_event", "after": 1})
    with pytest.raises(EngineFault, match="scripted failure"):
        generate("sglang", engine.url)


def test_an_engine_that_is_not_there_is_down() -> None:
    with pytest.raises(EngineFault) as raised:
        generate("sglang", "http://127.0.0.1:9")
    assert raised.value.name == "engine_down"
    facts = probe("sglang", "http://127.0.0.1:9")
    assert not facts.healthy
    assert "http://127.0.0.1:9" in (facts.problem or "")


def test_logprobs_that_are_missing_stay_missing(engine: ScriptedEngine) -> None:
    odd = [-0.1, float("nan"), float("-inf"), None, -9999]
    engine.script({"ids": [4, 5, 6, 7, 9], "logprobs": odd}, {"ids": [4, 5, 9], "logprobs": [-0.1]})
    values = generate("sglang", engine.url, stream=False)[0].logprobs
    assert values is not None
    np.testing.assert_allclose(values, [-0.1, np.nan, -np.inf, np.nan, -9999], rtol=1e-6)
    [misaligned] = generate("sglang", engine.url, stream=False)
    assert ids([misaligned]) == [4, 5, 9]
    assert misaligned.logprobs is None


def test_cancelling_aborts_the_call_at_the_engine(engine: ScriptedEngine) -> None:
    engine.script({"ids": [4, 5, 6], "hold": True, "after": 1})

    async def run() -> None:
        made = await make_engine("sglang", engine.url)
        call = EngineCall(rid="mine", prompt_ids=PROMPT, sampling={"max_tokens": 5})

        async def consume() -> None:
            async for _ in made.generate(call):
                begun.set()

        begun = asyncio.Event()
        task = asyncio.create_task(consume())
        await begun.wait()
        task.cancel()
        await asyncio.wait({task})
        await made.close()

    asyncio.run(run())
    until(lambda: engine.aborted == ["mine"])


def test_vllm_gives_prompt_ids_tokens_and_the_message(engine: ScriptedEngine) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    message = {"role": "assistant", "content": "look", "tool_calls": [call], "reasoning": "hm"}
    step = {"ids": [4, 5, 9], "message": message, "finish": "tool_calls"}
    engine.script(step, step)
    for stream in (True, False):
        pieces = generate("vllm", engine.url, stream=stream)
        assert ids(pieces) == [4, 5, 9]
        assert sum(piece.prompt_ids is not None for piece in pieces) == 1
        assert pieces[-1].finish_reason == "tool_calls"
        expected = {"role": "assistant", "content": "look", "reasoning_content": "hm", "tool_calls": [call]}
        assert pieces[-1].message == expected
    assert engine.requests[0]["return_token_ids"] is True


def test_an_openai_server_gives_text_and_usage(engine: ScriptedEngine) -> None:
    engine.script({"text": "hello"})
    pieces = generate("openai", engine.url)
    assert ids(pieces) == []
    assert pieces[-1].message == {"role": "assistant", "content": "hello"}
    assert pieces[-1].usage["completion_tokens"] == 2


def test_what_a_server_without_ids_answers_is_recorded_and_counted(engine: ScriptedEngine, tmp_path: Path) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": "{}"}}
    engine.script(
        {"text": "hello"}, {"text": "x", "message": {"role": "assistant", "content": "", "tool_calls": [call]}}
    )
    with running_proxy(tmp_path, engine.url, None, engine="openai", probe=True) as proxy:
        session = proxy.open()
        for stream in (True, False):
            session.post({"model": "policy", "messages": MESSAGES, "stream": stream})
        _, log = session.end()
        assert log.calls[0].finished.message["content"] == "hello"
        assert log.calls[1].finished.message["tool_calls"] == [call]
        built = session.build()
        assert (built.traces, built.tokens.sampled) == ([], 0)
        usage = [call.finished.usage for call in log.calls]
        assert built.calls.without_ids == built.calls.completions == 2
        assert built.calls.reported_completion_tokens == sum(one["completion_tokens"] for one in usage) == 4
        assert built.calls.reported_prompt_tokens == sum(one["prompt_tokens"] for one in usage) > 0


@pytest.mark.parametrize("kind", ["sglang", "vllm"])
def test_a_good_engine_is_found_good(engine: ScriptedEngine, kind: str) -> None:
    facts = probe(kind, engine.url)
    assert (facts.healthy, facts.problem, facts.returns_ids) == (True, None, True)
    assert facts.context_length == 4096


@pytest.mark.parametrize(
    ("kind", "step", "field"),
    [
        ("sglang", {"ids": [7], "without": ["meta_info", "output_ids"]}, "output_token_logprobs"),
        ("sglang", {"ids": [7], "logprobs": []}, "output_token_logprobs"),
        ("vllm", {"ids": [7], "without": ["prompt_token_ids"]}, "prompt_token_ids"),
        ("vllm", {"ids": [7], "fault": "no_ids"}, "token_ids"),
        ("vllm", {"ids": [7], "without": ["token_ids"]}, "token_ids"),
        ("vllm", {"ids": [7], "without": ["logprobs"]}, "logprobs"),
    ],
)
def test_a_router_that_drops_fields_is_found_in_seconds(
    engine: ScriptedEngine, kind: str, step: dict[str, Any], field: str
) -> None:
    engine.script(step | {"probe": True})
    begun = time.monotonic()
    facts = probe(kind, engine.url)
    assert time.monotonic() - begun < 5
    assert not facts.healthy
    assert f"`{field}`" in (facts.problem or "")
    assert "router" in (facts.problem or "")


def test_an_engine_that_hangs_is_found_in_seconds(engine: ScriptedEngine) -> None:
    engine.script({"ids": [7], "fault": "hang", "probe": True})
    begun = time.monotonic()
    facts = probe("sglang", engine.url)
    assert time.monotonic() - begun < 5
    assert "did not answer" in (facts.problem or "")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ["sglang", "openai"])
def test_an_engine_that_answers_health_alone_hangs(engine: ScriptedEngine, kind: str, stream: bool) -> None:
    engine.script({"ids": [7, 8, 9], "fault": "hang", "after": 1})
    begun = time.monotonic()
    with pytest.raises(EngineFault, match=r"nothing to anybody for 0\.3 s") as raised:
        generate(kind, engine.url, stream=stream, patience=0.3)
    assert raised.value.name == "engine_timeout"
    assert time.monotonic() - begun < 10


def test_a_call_waits_while_others_get_their_tokens(engine: ScriptedEngine) -> None:
    engine.script({"ids": [4, 5], "hold": True}, {"ids": [4] * 30, "pace": 0.1})

    async def run() -> list[int]:
        made = await make_engine("sglang", engine.url, 1.0)

        async def consume(rid: str) -> int:
            call = EngineCall(rid=rid, prompt_ids=PROMPT, sampling={"max_tokens": 50})
            return sum([len(piece.ids) async for piece in made.generate(call)])

        try:
            held = asyncio.create_task(consume("held"))
            while not engine.requests:
                await asyncio.sleep(0.01)
            others = await consume("paced")
            assert not held.done()
            engine.release()
            return [await held, others]
        finally:
            await made.close()

    assert asyncio.run(run()) == [2, 30]


@pytest.mark.parametrize("mode", [LogprobMode.RAW, LogprobMode.SAMPLING_TEMPERATURE])
def test_the_distribution_of_logprobs_is_found(tokenizer: Path, mode: LogprobMode) -> None:
    with scripted_engine(tokenizer, mode=mode.value) as engine:
        assert probe("sglang", engine.url).logprob_mode is mode
        assert probe("embedded", engine.url).logprob_mode is LogprobMode.SAMPLING_TEMPERATURE


AT = [0.1, 1.0, 2.0]
TOLD: list[tuple[list[float | None], bool, LogprobMode | None]] = [
    ([-3.0, -3.01, -2.99], False, LogprobMode.RAW),
    ([-3.0, -3.01, -2.99], True, LogprobMode.RAW),
    ([0.0, -0.0001, -0.06], False, LogprobMode.SAMPLING_TEMPERATURE),  # a model that is nearly sure
    ([-5.0, -5.58, -5.585], False, LogprobMode.SAMPLING_TEMPERATURE),  # one that finds all tokens alike
    ([0.0, -0.0001, -0.001], False, None),
    ([-0.001, -0.001, -0.001], True, None),
    ([0.0, 0.0, 0.0], True, LogprobMode.PROCESSED),
    ([-1.0, None, -1.0], False, None),
]


@pytest.mark.parametrize(("told", "behind_top_k", "mode"), TOLD)
def test_the_distribution_is_told_by_three_temperatures(
    told: list[float | None], behind_top_k: bool, mode: LogprobMode | None
) -> None:
    async def likeliest(temperature: float) -> float | None:
        return told[AT.index(temperature)]

    assert asyncio.run(mode_of(likeliest, behind_top_k=behind_top_k)) is mode


def test_logits_are_no_logprobs() -> None:
    async def likeliest(temperature: float) -> float:
        return 3.0 / temperature

    with pytest.raises(EngineFault, match="processed_logprobs"):
        asyncio.run(mode_of(likeliest, behind_top_k=True))


def test_a_wrong_kind_or_url_names_the_mistake() -> None:
    with pytest.raises(TaskFault, match="sglang"):
        asyncio.run(make_engine("nothing", "http://127.0.0.1:9"))
    with pytest.raises(ConfigError, match=r"inference\.base_url"):
        asyncio.run(make_engine("sglang", "127.0.0.1:9"))
