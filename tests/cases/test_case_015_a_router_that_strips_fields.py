"""Case 15: a router that strips the fields that training needs is found by the first probe, which names the field."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from peers.engine import scripted_engine
from polar.protocols import EngineFacts
from polar.proxy import make_engine

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"
STRIPPED = [
    ("sglang", [], ["meta_info"], "output_token_logprobs"),
    ("sglang", [], ["output_token_logprobs"], "output_token_logprobs"),
    ("vllm", [], ["prompt_token_ids"], "prompt_token_ids"),
    ("vllm", [], ["token_ids"], "token_ids"),
    ("vllm", [], ["logprobs"], "logprobs"),
    ("vllm", [GENERATE], ["token_ids"], "token_ids"),
    ("vllm", [COMPLETIONS], ["token_ids"], "token_ids"),
    ("vllm", [GENERATE, COMPLETIONS], ["logprobs"], "logprobs"),
]


def probe(kind: str, url: str) -> EngineFacts:
    async def run() -> EngineFacts:
        engine = await make_engine(kind, url)
        try:
            return await engine.probe()
        finally:
            await engine.close()

    return asyncio.run(run())


@pytest.mark.parametrize(("kind", "offers", "without", "field"), STRIPPED)
def test_the_probe_fails_in_seconds_and_names_the_field(
    tokenizer: Path, kind: str, offers: list[str], without: list[str], field: str
) -> None:
    with scripted_engine(tokenizer, offers=offers) as engine:
        engine.script(*[{"text": "x", "without": without, "probe": True}] * 4)
        begun = time.monotonic()
        facts = probe(kind, engine.url)
        assert time.monotonic() - begun < 5
        assert not facts.healthy
        assert f"`{field}`" in (facts.problem or "")
        assert "router" in (facts.problem or "")


def test_a_router_that_strips_one_route_leaves_the_other(tokenizer: Path) -> None:
    with scripted_engine(tokenizer, offers=[GENERATE, COMPLETIONS]) as engine:
        engine.script({"text": "x", "without": ["token_ids"], "probe": True})
        facts = probe("vllm", engine.url)
        assert (facts.healthy, facts.route, facts.returns_ids) == (True, COMPLETIONS, True)
