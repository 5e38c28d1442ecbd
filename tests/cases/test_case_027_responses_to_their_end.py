"""Case 27: a stream of Responses always has its end, with the ids that it began with; custom tools come back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peers.engine import ScriptedEngine
from running_proxy import OpenSession, RunningProxy

TOOLS = [{"type": "function", "name": "bash", "parameters": {}}, {"type": "custom", "name": "apply_patch"}]
CALLS = [
    {"name": "bash", "arguments": {"cmd": "ls"}},
    {"name": "apply_patch", "arguments": {"input": '*** Begin Patch\n+"é"\n*** End Patch\n'}},
    {"name": "bash", "arguments": {}},
    {"name": "apply_patch", "arguments": {"file": "x"}},
]
TEXT = "<think>hm</think>so " + "".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in CALLS)


def streamed(session: OpenSession, items: Any) -> list[dict[str, Any]]:
    answer = session.post({"model": "policy", "input": items, "tools": TOOLS, "stream": True}, "/v1/responses")
    assert answer.status_code == 200
    return [json.loads(line[6:]) for line in answer.text.split("\n") if line.startswith("data: ")]


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["type"] == f"response.{kind}"]


def test_items_are_the_same_in_every_event_and_come_back(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    engine.script({"text": TEXT}, {"text": "done"})
    session = proxy.open()
    events = streamed(session, "go")
    [completed] = of(events, "completed")
    assert events[-1] is completed
    output = completed["response"]["output"]
    assert [item["type"] for item in output] == ["reasoning", "message", *["function_call", "custom_tool_call"] * 2]
    assert [event["item"]["id"] for event in of(events, "output_item.added")] == [item["id"] for item in output]
    assert [event["item"] for event in of(events, "output_item.done")] == output
    calls, custom = output[2::2], output[3::2]
    done = of(events, "function_call_arguments.done")
    assert [(event["item_id"], event["arguments"]) for event in done] == [
        (call["id"], call["arguments"]) for call in calls
    ]
    done = of(events, "custom_tool_call_input.done")
    assert [(event["item_id"], event["input"]) for event in done] == [(call["id"], call["input"]) for call in custom]
    assert [call["input"] for call in custom] == [CALLS[1]["arguments"]["input"], '{"file": "x"}']
    results = [{"type": f"{call['type']}_output", "call_id": call["call_id"], "output": "ok"} for call in output[2:]]
    streamed(session, [{"role": "user", "content": "go"}, *output, *results])
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued"]
    assert len(session.build().traces) == 1


@pytest.mark.parametrize("fault", ["drop", "error_event"])
def test_an_engine_that_dies_half_way_ends_the_stream_in_a_failed_response(
    engine: ScriptedEngine, proxy: RunningProxy, fault: str
) -> None:
    engine.script({"text": "<think>hm</think>" + "half of it " * 4, "fault": fault, "after": 20, "pace": 0.02})
    session = proxy.open()
    events = streamed(session, "go")
    assert of(events, "output_text.delta")
    [failed] = of(events, "failed")
    assert events[-1] is failed
    response = failed["response"]
    assert (response["status"], response["error"]["code"]) == ("failed", "server_error")
    assert response["id"] == events[0]["response"]["id"]
    assert [item["type"] for item in response["output"]] == ["reasoning"]
    record, log = session.end()
    assert record.fault is not None
    assert not log.calls[0].delivered
