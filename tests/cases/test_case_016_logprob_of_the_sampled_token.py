"""Case 16: the recorded logprob is the sampled token's own, not that of the likeliest token beside it."""

from __future__ import annotations

import pytest

from peers.engine import ScriptedEngine
from running_proxy import RunningProxy, user


@pytest.mark.parametrize("stream", [True, False])
def test_the_sampled_tokens_logprob_is_recorded(engine: ScriptedEngine, chat_proxy: RunningProxy, stream: bool) -> None:
    # The scripted engine lists another token at -0.1 in top_logprobs.
    engine.script({"ids": [4, 5], "logprobs": [-2.3, -2.3], "finish": "length"})
    session = chat_proxy.open()
    session.post({"model": "policy", "messages": [user("x")], "stream": stream})
    session.end()
    [trace] = session.build().traces
    assert trace.response_logprobs.tolist() == pytest.approx([-2.3, -2.3])
