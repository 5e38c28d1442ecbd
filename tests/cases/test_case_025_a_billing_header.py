"""Case 25: a line of the first system block that is another in every request forks nothing, and is logged as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peers.engine import ScriptedEngine
from running_proxy import OpenSession, RunningProxy, user

RULES = "be brief. " * 150
HEADER = "x-anthropic-billing-header: cc_version=2.0; cch={};"


def one_text(cch: str) -> Any:
    return f"{HEADER.format(cch)}\n{RULES}"


def own_block(cch: str) -> Any:
    return [{"type": "text", "text": HEADER.format(cch)}, {"type": "text", "text": RULES}]


def first_line(cch: str) -> Any:
    return [{"type": "text", "text": one_text(cch), "cache_control": {"type": "ephemeral"}}]


def sent(session: OpenSession, system: Any, messages: list[Any]) -> bytes:
    document = {"model": "policy", "max_tokens": 50, "system": system, "messages": messages}
    assert session.post(document, "/v1/messages").status_code == 200
    return json.dumps(document).encode()


@pytest.mark.parametrize("system", [one_text, own_block, first_line])
def test_two_turns_are_one_trace_with_one_start(engine: ScriptedEngine, proxy: RunningProxy, system: Any) -> None:
    engine.script({"text": "yes"}, {"text": "no"})
    session = proxy.open()
    history = [user("one"), {"role": "assistant", "content": "yes"}, user("two")]
    bodies = [sent(session, system("3f2a"), history[:1]), sent(session, system("90cd"), history)]
    first, second = (request["input_ids"] for request in engine.requests)
    assert len(first) > 1000
    assert second[: len(first)] == first
    _, log = session.end()
    assert [log.body(call) for call in log.calls] == bodies
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued"]
    [trace] = session.build().traces
    assert trace.trainable == sum(len(call.ids) for call in log.calls)


def test_the_model_is_not_shown_it(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    for system in (one_text, own_block, first_line, lambda cch: RULES):
        sent(proxy.open(), system("1"), [user("hi")])
    assert len({json.dumps(request["input_ids"]) for request in engine.requests}) == 1
