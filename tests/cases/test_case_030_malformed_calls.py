"""Case 30: a malformed tool call is an answer like any other in every dialect, and what was sampled is recorded as it
was; a call of an unknown tool is the harness's to refuse."""

from __future__ import annotations

import numpy as np
import pytest

from dialects import TOOLS, body, post, text_of
from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from polar.proxy.dialects import DIALECTS
from running_proxy import RunningProxy

MALFORMED = [
    "<tool_call><function=bash</tool_call>",
    '<tool_call>{"name": "bash", "arguments": {"cmd": "l',
    '<tool_call>{"name": 5}</tool_call>',
]
UNKNOWN = '<tool_call>{"name": "nope", "arguments": {}}</tool_call>'


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("text", [*MALFORMED, UNKNOWN])
def test_it_is_answered_and_recorded_as_it_was_sampled(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering, dialect: str, stream: bool, text: str
) -> None:
    engine.script({"text": text})
    session = proxy.open()
    answer = post(session, dialect, body("go", max_tokens=500, tools=TOOLS[dialect]), stream=stream)
    assert answer.status_code == 200
    if not stream:
        assert text_of(dialect, answer.json()) == ("" if text == UNKNOWN else text)
        assert ("nope" in answer.text) == (text == UNKNOWN)
    [call] = session.end()[1].calls
    assert rendering.decode(call.ids) == text + "<|im_end|>"
    assert call.logprobs is not None
    assert np.all(call.logprobs == np.float32(-0.5))
    built = session.build()
    assert built.tokens.trainable == built.tokens.sampled == len(call.ids)
