"""SGLang by chat completions: ids in the fields of each version, found missing by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from peers.engine import ScriptedEngine
from polar.protocols import EngineFacts, Rendering
from polar.proxy import make_engine
from polar.records import LogprobMode
from running_proxy import running_proxy, user

VERSIONS = ["meta_info", "response_token_ids", "sglext", "token_ids"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("tells", VERSIONS)
def test_a_conversation_is_recorded_with_the_engines_own_ids(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, tells: str, stream: bool
) -> None:
    engine.script(*({"text": text, "tells": tells, "logprobs": [-0.25] * 4} for text in ("one", "two")))
    with running_proxy(tmp_path, engine.url, None, engine="sglang_chat", context_length=None) as proxy:
        session = proxy.open()
        messages = [user("hi")]
        for said in ("one", "two"):
            asked: dict[str, Any] = {"model": "policy", "messages": messages, "stream": stream}
            assert said in session.post(asked).text
            messages += [{"role": "assistant", "content": said}, user("go on")]
        _, log = session.end()
        first, second = log.calls
        assert [rendering.decode(call.ids) for call in log.calls] == ["one<|im_end|>", "two<|im_end|>"]
        assert [call.logprobs.tolist() for call in log.calls] == [[-0.25] * 4] * 2
        assert rendering.decode(log.prompt_ids(second)).endswith("go on<|im_end|>\n<|im_start|>assistant\n")
        assert (second.prompt.source, second.prompt.keep) == ("engine", first.length)
        assert len(session.build().traces) == 1
        assert not any(request["stream"] for request in engine.requests)


def probed(url: str) -> EngineFacts:
    async def story() -> EngineFacts:
        engine = await make_engine("sglang_chat", url)
        try:
            return await engine.probe()
        finally:
            await engine.close()

    return asyncio.run(story())


def test_a_good_one_is_found_good(engine: ScriptedEngine) -> None:
    facts = probed(engine.url)
    assert (facts.healthy, facts.problem) == (True, None)
    assert (facts.returns_ids, facts.returns_logprobs, facts.route) == (True, True, "/v1/chat/completions")
    assert facts.logprob_mode in (None, LogprobMode.RAW)


def test_an_answer_without_ids_is_a_lie(tmp_path: Path, engine: ScriptedEngine) -> None:
    with running_proxy(tmp_path, engine.url, None, engine="sglang_chat", context_length=None) as proxy:
        engine.script({"text": "x", "fault": "no_ids"})
        session = proxy.open()
        assert "0.5.13" in session.post({"model": "policy", "messages": [user("x")]}).text
        assert session.end()[0].fault == "engine_lies"
