"""Case 14: whatever a client says of logprobs, the engine is asked for them; several answers at once are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from running_proxy import RunningProxy, running_proxy, user

ROUTES = ["/generate", "/v1/chat/completions", "/v1/completions", "/inference/v1/generate"]
ASKED = [{"logprobs": True, "top_logprobs": None}, {"logprobs": False}, {"logprobs": True, "top_logprobs": 5}, {}]


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def engine(route: str, tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer, offers=[] if route in ROUTES[:2] else [route]) as made:
        yield made


@pytest.fixture
def proxy(route: str, engine: ScriptedEngine, rendering: Rendering, tmp_path: Path) -> Iterator[RunningProxy]:
    kind = "sglang" if route == "/generate" else "vllm"
    with running_proxy(tmp_path, engine.url, rendering, engine=kind, probe=True) as made:
        yield made


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("fields", ASKED)
def test_logprobs_are_always_recorded(proxy: RunningProxy, fields: dict[str, Any], stream: bool) -> None:
    session = proxy.open()
    answered = session.post({"model": "policy", "messages": [user("x")], "stream": stream, **fields})
    assert answered.status_code == 200
    session.end()
    built = session.build()
    assert built.tokens.trainable > 0
    assert built.calls.missing_logprobs == 0
    assert built.traces[0].response_logprobs.tolist() == [-0.5] * built.tokens.trainable


def test_several_answers_are_refused_by_name(proxy: RunningProxy, engine: ScriptedEngine) -> None:
    before = len(engine.requests)
    refused = proxy.open().post({"model": "policy", "messages": [user("x")], "n": 2})
    assert (refused.status_code, refused.json()["error"]["message"].startswith("n: ")) == (400, True)
    assert len(engine.requests) == before
