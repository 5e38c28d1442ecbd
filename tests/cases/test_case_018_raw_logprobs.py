"""Case 18: of which distribution the engine's logprobs are is recorded, and those that a trainer would not compute
again at its temperature are never trained on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peers.engine import scripted_engine
from polar.protocols import Rendering
from polar.records import LogprobMode
from running_proxy import running_proxy, user

RAW, PROCESSED, AS_SAMPLED = LogprobMode.RAW, LogprobMode.PROCESSED, LogprobMode.SAMPLING_TEMPERATURE
COMPLETIONS = "/v1/completions"
USABLE: list[tuple[LogprobMode, dict[str, Any], bool]] = [
    (AS_SAMPLED, {"temperature": 0.7}, True),
    (AS_SAMPLED, {"temperature": 0.7, "top_p": 0.9, "top_k": 5}, True),
    (RAW, {"temperature": 0.7}, False),
    (RAW, {"temperature": 1.0}, True),
    (RAW, {}, True),
    (RAW, {"temperature": 1.0, "top_p": 0.9}, True),
    (RAW, {"temperature": 0}, True),
    (PROCESSED, {"temperature": 0.7}, True),
    (PROCESSED, {"temperature": 0.7, "top_p": 0.9}, False),
    (PROCESSED, {"temperature": 0.7, "top_k": 5}, False),
    (PROCESSED, {"temperature": 0.7, "min_p": 0.1}, False),
]
BY_KIND = [("sglang", *case) for case in USABLE if case[0] is not PROCESSED]
BY_KIND += [(kind, *case) for kind in ("vllm", "vllm_chat") for case in USABLE]


@pytest.mark.parametrize(("kind", "mode", "sampling", "usable"), BY_KIND)
def test_logprobs_of_another_distribution_are_no_logprobs(
    tokenizer: Path,
    rendering: Rendering,
    tmp_path: Path,
    kind: str,
    mode: LogprobMode,
    sampling: dict[str, Any],
    usable: bool,
) -> None:
    with (
        scripted_engine(tokenizer, offers=[COMPLETIONS], mode=mode.value) as engine,
        running_proxy(tmp_path, engine.url, rendering, engine=kind, probe=True) as proxy,
    ):
        session = proxy.open(sampling=sampling)
        session.turn([user("x")])
        _, log = session.end()
        assert log.header.logprob_mode == mode
        assert log.calls[0].logprobs is not None
        built = session.build()
        [trace] = built.traces
        assert trace.trainable == built.tokens.sampled > 0
        assert (trace.response_logprobs is not None) is usable
        assert built.calls.missing_logprobs == (not usable)
