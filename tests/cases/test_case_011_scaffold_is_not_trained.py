"""Case 11: generation prompt and the newline behind an end of turn are scaffold; the mask is 1 on what was sampled."""

from __future__ import annotations

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import RunningProxy, user


def test_the_mask_is_one_exactly_on_what_was_sampled(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    engine.script({"text": "first"}, {"text": "second"})
    session = proxy.open()
    messages = [user("a")]
    session.turn(messages)
    messages.append(user("b"))
    session.turn(messages)
    session.end()
    [trace] = session.build().traces
    trained = rendering.decode(trace.response_ids[trace.loss_mask == 1])
    between = rendering.decode(trace.response_ids[trace.loss_mask == 0])
    assert trained == "first<|im_end|>second<|im_end|>"
    assert between == "\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    assert rendering.decode(trace.prompt_ids).endswith("<|im_start|>assistant\n")
