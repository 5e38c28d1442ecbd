"""Case 4: parsing moves the text behind a tool call before it; the sampled order stays, a changed replay forks."""

from __future__ import annotations

import pytest

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import RunningProxy, user

TOOL = {"type": "function", "function": {"name": "bash", "parameters": {"type": "object"}}}
TEXT = 'A <tool_call>{"name": "bash", "arguments": {}}</tool_call> B'


@pytest.mark.parametrize(("replayed", "traces"), [("A  B", 1), ("A B", 2)])
def test_the_sampled_order_is_what_is_trained(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering, replayed: str, traces: int
) -> None:
    engine.script({"text": TEXT}, {"text": "done"})
    session = proxy.open()
    messages = [user("go")]
    answer = session.turn(messages, tools=[TOOL])
    assert answer["content"] == "A  B"
    answer["content"] = replayed
    messages.append({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "ok"})
    session.turn(messages, tools=[TOOL])
    _, log = session.end()
    built = session.build()
    assert len(built.traces) == traces
    assert built.tokens.trainable == built.tokens.sampled
    assert rendering.decode(log.calls[0].ids) == TEXT + "<|im_end|>"
    assert log.calls[1].prompt.source == ("continued" if traces == 1 else "rendered")
