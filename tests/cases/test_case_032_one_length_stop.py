"""Case 32: one answer cut by length ends nothing: the harness sees it, goes on, and the turn is kept and trained."""

from __future__ import annotations

import json

from peers.engine import ScriptedEngine
from running_proxy import RunningProxy, user


def test_a_length_stop_at_turn_five_is_kept(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    session = proxy.open()
    messages = [user("start")]
    for turn in range(1, 8):
        engine.script({"text": f"turn {turn}", **({"finish": "length"} if turn == 5 else {})})
        answer = session.post({"model": "policy", "messages": messages})
        [choice] = json.loads(answer.text)["choices"]
        assert choice["finish_reason"] == ("length" if turn == 5 else "stop")
        messages += [choice["message"], user("go on")]
    record, log = session.end()
    assert record.completions == 7
    assert [call.finished.finish_reason for call in log.calls].count("length") == 1
    built = session.build()
    [trace] = built.traces
    assert trace.metadata["calls"] == [1, 2, 3, 4, 5, 6, 7]
    assert trace.finish_reason == "stop"
    assert built.tokens.trainable == built.tokens.sampled
