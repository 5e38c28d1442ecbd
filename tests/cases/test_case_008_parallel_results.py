"""Case 8: templates of Qwen's kind write consecutive tool results as one block: two and three of them are one turn."""

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


@pytest.mark.parametrize("count", [2, 3])
def test_results_are_merged_as_the_template_merges_them(count: int, tmp_path: Path) -> None:
    folder = STYLES["qwen"].make(tmp_path / "tokenizer")
    rendering = load_rendering(folder)
    with scripted_engine(folder) as engine, running_proxy(tmp_path, engine.url, rendering) as proxy:
        engine.script({"text": "\n".join([CALLS["qwen"]] * count)}, {"text": "done"})
        session = proxy.open()
        messages: list[dict[str, Any]] = [user("go")]
        answer = session.turn(messages, tools=[TOOL])
        messages += [
            {"role": "tool", "tool_call_id": call["id"], "content": f"result {at}"}
            for at, call in enumerate(answer["tool_calls"])
        ]
        asked = [*messages]
        session.turn(messages, tools=[TOOL])
        _, log = session.end()
    ids = log.calls[1].prompt.ids
    whole = rendering.render(asked, [TOOL])
    np.testing.assert_array_equal(ids, whole[len(whole) - len(ids) :])
    block = "".join(f"\n[result]\nresult {at}\n[/result]" for at in range(count))
    assert rendering.decode(ids) == f"\n<|im_start|>user{block}<|im_end|>\n<|im_start|>assistant\n"
