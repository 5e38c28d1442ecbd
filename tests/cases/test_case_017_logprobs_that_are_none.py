"""Case 17: NaN, infinities and null are not trained on: session and mask stay, the trace's logprobs are None."""

from __future__ import annotations

import pytest

from peers.engine import ScriptedEngine
from running_proxy import RunningProxy, user

ODD = [-0.1, float("nan"), float("-inf"), None, -9999]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("bad", [ODD, *([-0.1, value, -0.1] for value in ODD[1:])])
@pytest.mark.parametrize("face", ["proxy", "chat_proxy"])
def test_a_trace_with_an_unusable_logprob_is_refused_by_name(
    request: pytest.FixtureRequest, engine: ScriptedEngine, face: str, bad: list[float | None], stream: bool
) -> None:
    engine.script({"ids": [4] * len(bad), "logprobs": bad, "finish": "length"})
    proxy: RunningProxy = request.getfixturevalue(face)
    session = proxy.open()
    assert session.post({"model": "policy", "messages": [user("x")], "stream": stream}).status_code == 200
    record, _ = session.end()
    built = session.build()
    assert record.fault is None
    assert built.traces[0].response_logprobs is None
    assert built.traces[0].trainable == built.tokens.sampled == len(bad)
    assert built.calls.missing_logprobs == 1
