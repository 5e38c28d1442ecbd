"""Case 7: results, words of the user's and results again behind one turn: the ids that follow it are those that the
template writes there when all is rendered at once, in every family's style."""

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


@pytest.mark.parametrize("style", CALLS)
def test_mixed_messages_follow_as_if_rendered_at_once(style: str, tmp_path: Path) -> None:
    folder = STYLES[style].make(tmp_path / "tokenizer")
    rendering = load_rendering(folder)
    with scripted_engine(folder) as engine, running_proxy(tmp_path, engine.url, rendering) as proxy:
        engine.script({"text": CALLS[style]}, {"text": "done"})
        session = proxy.open()
        messages: list[dict[str, Any]] = [user("go")]
        answer = session.turn(messages, tools=[TOOL])
        result = {"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "one é"}
        messages += [result, user("and"), result | {"content": "two"}]
        asked = [*messages]
        session.turn(messages, tools=[TOOL])
        _, log = session.end()
    one, two = log.calls
    assert (two.prompt.source, two.prompt.keep) == ("continued", one.length)
    whole = rendering.render(asked, [TOOL])
    np.testing.assert_array_equal(two.prompt.ids, whole[len(whole) - len(two.prompt.ids) :])
    written = rendering.decode(two.prompt.ids)
    assert [written.count(text) for text in ("one é", "and", "two")] == [1, 1, 1]
    [trace] = session.build().traces
    assert trace.trainable == len(one.ids) + len(two.ids)
