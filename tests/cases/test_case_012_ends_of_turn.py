"""Case 12: a model may end on another id than the tokenizer's; finish_reason says what happened, no end is invented."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer
from polar.protocols import Rendering
from polar.proxy import load_rendering
from running_proxy import RunningProxy, running_proxy, user


def test_another_end_is_an_end_and_is_trained(tmp_path: Path) -> None:
    folder = make_tokenizer(tmp_path / "tokenizer")
    rendering = load_rendering(folder)
    other = next(n for n in range(rendering.stop_ids[0]) if rendering.decode(np.asarray([n])) == "<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [rendering.stop_ids[0], other]}))
    with (
        scripted_engine(folder) as engine,
        running_proxy(tmp_path, engine.url, load_rendering(folder)) as proxy,
    ):
        first = rendering.render([user("x")], None)[:3].tolist()
        engine.script({"ids": [*first, other], "matched": other}, {"text": "done"})
        session = proxy.open()
        messages = [user("a")]
        session.turn(messages)
        messages.append(user("b"))
        session.turn(messages)
        assert other in engine.requests[0]["sampling_params"]["stop_token_ids"]
        session.end()
    assert session.log.calls[0].finished.finish_reason == "stop"
    [trace] = session.build().traces
    assert trace.response_ids[3] == other
    assert trace.loss_mask[3] == 1


def test_a_cut_answer_gets_its_end_as_context(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    engine.script({"text": "cut", "finish": "length"}, {"text": "done"})
    session = proxy.open()
    messages = [user("a")]
    session.turn(messages)
    messages.append(user("b"))
    session.turn(messages)
    session.end()
    [trace] = session.build().traces
    assert rendering.decode(trace.response_ids[trace.loss_mask == 1]) == "cutdone<|im_end|>"
    assert rendering.decode(trace.response_ids).startswith("cut<|im_end|>\n<|im_start|>user\nb")
