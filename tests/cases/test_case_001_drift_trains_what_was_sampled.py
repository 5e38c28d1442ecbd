"""Case 1: text encoded again gives other ids ("he" + "llo" is "hello"); what was sampled is trained, drift counted."""

from __future__ import annotations

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import RunningProxy, user


def test_ids_are_carried_and_never_encoded_again(
    engine: ScriptedEngine, chat_proxy: RunningProxy, rendering: Rendering
) -> None:
    he, llo, hello = (int(rendering.render([user(text)], None)[-14]) for text in ("he", "llo", "hello"))
    end = rendering.stop_ids[0]
    engine.script({"ids": [he, llo, end]}, {"text": "done"})
    session = chat_proxy.open()
    messages = [user("say it")]
    assert session.turn(messages)["content"] == "hello"
    messages.append(user("again"))
    session.turn(messages)
    _, log = session.end()
    built = session.build()
    assert hello in log.prompt_ids(log.calls[1])
    assert built.calls.drift == 1
    assert built.traces[0].response_ids.tolist() == [he, llo, end]
    assert built.traces[0].loss_mask.tolist() == [1, 1, 1]
    assert not any(hello in trace.response_ids[trace.loss_mask == 1] for trace in built.traces)
