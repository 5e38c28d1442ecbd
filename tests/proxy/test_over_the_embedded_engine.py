"""The truth end to end: what a trace says a token's logprob was is what one pass over the trace's own ids gives."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch", reason="the embedded engine needs torch: install the extra 'demo'")

from embedded.real_engine import Engine, engine_process, full_forward, save_random_policy
from polar.proxy import load_rendering
from polar.records import Trace
from running_proxy import RunningProxy, running_proxy, until, user


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = save_random_policy(tmp_path_factory.mktemp("policy"), seed=1)
    with engine_process(folder, "--weight-version", "1") as engine:
        yield engine


@pytest.fixture
def house(served: Engine, tmp_path: Path) -> Iterator[RunningProxy]:
    url = str(served.http.base_url).rstrip("/")
    rendering = load_rendering(served.folder)
    with running_proxy(tmp_path, url, rendering, engine="embedded", context_length=512) as proxy:
        yield proxy


def recomputed(engine: Engine, trace: Trace, temperature: float) -> np.ndarray:
    return np.asarray(
        full_forward(engine.policy, trace.prompt_ids.tolist(), trace.response_ids.tolist(), temperature), np.float32
    )


@pytest.mark.parametrize("stream", [True, False])
def test_recorded_and_recomputed_logprobs_are_one(served: Engine, house: RunningProxy, stream: bool) -> None:
    session = house.open(sampling={"temperature": 0.8, "max_tokens": 12, "seed": 7})
    messages = [user("what is the host ?")]
    for _ in range(4):
        if stream:
            session.post({"model": "policy", "messages": messages, "stream": True})
            messages.append(session.log.calls[-1].finished.message)
        else:
            session.turn(messages)
        messages.append(user("no such file"))
    session.end()
    built = session.build()
    [trace] = built.traces
    assert built.calls.continued == 3
    trained = trace.loss_mask == 1
    gap = np.abs(recomputed(served, trace, 0.8) - trace.response_logprobs)[trained]
    assert gap.max() < 1e-4
    assert built.tokens.trainable == built.tokens.sampled == int(trained.sum())


def test_an_answer_goes_on_under_new_weights(served: Engine, house: RunningProxy, tmp_path: Path) -> None:
    other = save_random_policy(tmp_path / "other", seed=2)
    session = house.open(sampling={"max_tokens": 400, "ignore_eos": True})
    asked = {"model": "policy", "messages": [user("what is the host ?")], "stream": True}
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(session.post, asked)
        until(lambda: house.proxy.sampled(session.key) > 5)
        served.post("/pause_generation", {"mode": "abort"})
        served.post("/update_weights_from_disk", {"model_path": str(other), "weight_version": "2"})
        served.post("/continue_generation", {})
        assert "[DONE]" in waiting.result().text
    [call] = session.end()[1].calls
    assert [version for _, _, version in call.spans] == ["1", "2"]
    assert len(call.ids) == 400
    served.post("/update_weights_from_disk", {"model_path": str(served.folder), "weight_version": "1"})
