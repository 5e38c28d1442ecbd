"""Case 30, in every family's own format: a malformed call is the answer's text, the next turn goes on from it, and what
was sampled stays as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.chat_templates import CALLS, STYLES
from peers.engine import scripted_engine
from polar.proxy import load_rendering
from running_proxy import running_proxy, user

TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}
MALFORMED = {
    "qwen": ['<tool_call>{"name": "bash", "arguments": {"cmd": "l'],
    "coder": ["<tool_call><function=bash", "<function=bash><parameter=cmd>ls</function>"],
    "llama": ['{"name": "bash", "parameters": {"cmd', '{"name": "unknown", "parameters": {}}'],
    "deepseek": ["<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>{<｜tool▁call▁end｜>"],
    "harmony": ['<|channel|>commentary to=functions.bash json<|message|>{"cmd": "l'],
}
UNKNOWN = {style: text.replace("bash", "unknown") for style, text in CALLS.items() if style != "llama"}


def turns(style: str, text: str, folder: Path) -> tuple[dict[str, Any], Any, Any]:
    """The first of two answers, the log, and what was built."""
    tokenizer = STYLES[style].make(folder / "tokenizer")
    rendering = load_rendering(tokenizer)
    with scripted_engine(tokenizer) as engine, running_proxy(folder, engine.url, rendering) as proxy:
        engine.script({"text": text}, {"text": "done"})
        session = proxy.open()
        messages = [user("go")]
        answer = session.turn(messages, tools=[TOOL])
        for call in answer.get("tool_calls", []):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "no such tool"})
        session.turn([*messages, user("again")], tools=[TOOL])
        _, log = session.end()
        assert rendering.decode(log.calls[0].ids).startswith(text)
        return answer, log, session.build()


@pytest.mark.parametrize(("style", "text"), [(style, text) for style, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_is_text_and_is_continued(style: str, text: str, tmp_path: Path) -> None:
    answer, log, built = turns(style, text, tmp_path)
    assert (answer["content"], "tool_calls" in answer) == (text, False)
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued"]
    [trace] = built.traces
    assert trace.trainable == sum(len(call.ids) for call in log.calls)
    assert np.all(trace.response_logprobs[trace.loss_mask == 1] == np.float32(-0.5))


@pytest.mark.parametrize("style", UNKNOWN)
def test_a_call_of_an_unknown_tool_is_the_harnesss_to_refuse(style: str, tmp_path: Path) -> None:
    answer, log, built = turns(style, UNKNOWN[style], tmp_path)
    assert [call["function"]["name"] for call in answer["tool_calls"]] == ["unknown"]
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued"]
    assert len(built.traces) == 1
