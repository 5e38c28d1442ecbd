"""Case 22: how far each engine's logprobs are from a trainer's, on the same prompts, with a real model."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines.real import converse, gaps, program, sglang, vllm
from running_proxy import running_proxy

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
STARTS = {
    "sglang": (sglang, "POLAR_TEST_SGLANG", []),
    "vllm": (vllm, "POLAR_TEST_VLLM", ["--enable-scale-out", "--logprobs-mode", "processed_logprobs"]),
}


@pytest.mark.parametrize("kind", STARTS)
def test_the_gap_is_that_of_the_precision(kind: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    start, variable, options = STARTS[kind]
    model = Path(program("POLAR_TEST_SMOLLM", "a folder with SmolLM2-135M-Instruct"))
    python = program(variable, f"the Python of {kind}")
    with (
        start(python, model, tmp_path / "log", "--dtype", "bfloat16", *options) as engine,
        running_proxy(tmp_path / "proxy", engine.url, None, engine=kind, probe=True) as proxy,
    ):
        session = proxy.open(sampling={"temperature": 1.0, "ignore_eos": True})
        converse(session, turns=6, max_tokens=60)
        _, log = session.end()
        told = gaps(engine, log, 1.0, request)
        assert told["bfloat16"][1] < 0.08
        assert told["float32"][1] < 0.08
