"""Case 9: arguments of a tool call come back as text, as a map, empty, cut off or as a list, and every template writes
the call, whether it walks them, spells them as JSON or puts the text where it stands."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from peers.chat_templates import CALLS, STYLES
from peers.engine import scripted_engine
from polar.protocols import Rendering
from polar.proxy import load_rendering
from running_proxy import RunningProxy, running_proxy, user

TOOL = {"type": "function", "function": {"name": "bash", "description": "d", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module", params=[*CALLS, "open_thinking"])
def house(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Any, Any]]:
    path = tmp_path_factory.mktemp("house")
    folder = STYLES[request.param].make(path / "tokenizer")
    rendering = load_rendering(folder)
    with scripted_engine(folder) as engine, running_proxy(path, engine.url, rendering) as proxy:
        yield proxy, rendering


@pytest.mark.parametrize("arguments", ["{}", {}, "", None, '{"a":1', [1], '[{"a": 1}]', '"text"', '{"a": "é"}'])
def test_the_call_is_written(house: tuple[RunningProxy, Rendering], arguments: Any) -> None:
    proxy, rendering = house
    session = proxy.open()
    call = {"id": "c", "type": "function", "function": {"name": "bash", "arguments": arguments}}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    session.turn([user("go"), asked, {"role": "tool", "tool_call_id": "c", "content": "ok"}], tools=[TOOL])
    [made] = session.end()[1].calls
    prompt = rendering.decode(made.prompt.ids)
    assert "bash" in prompt.rpartition("go")[2]
    assert "ok" in prompt
    if arguments == '{"a": "é"}':
        assert "é" in prompt
    if arguments == '{"a":1':
        assert '{"a":1' in prompt.replace('\\"', '"')
