"""Case 2: after drift the engine's context is not the trace's: avoided by tokens in, two traces where it renders."""

from __future__ import annotations

import numpy as np

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, user


def two_turns(session: OpenSession, engine: ScriptedEngine, rendering: Rendering) -> list[int]:
    he, llo = (int(rendering.render([user(text)], None)[-14]) for text in ("he", "llo"))
    sampled = [he, llo, rendering.stop_ids[0]]
    engine.script({"ids": sampled}, {"text": "done"})
    messages = [user("say it")]
    session.turn(messages)
    messages.append(user("again"))
    session.turn(messages)
    session.end()
    return sampled


def test_tokens_in_give_the_engine_what_was_sampled(
    engine: ScriptedEngine, proxy: RunningProxy, rendering: Rendering
) -> None:
    session = proxy.open()
    sampled = two_turns(session, engine, rendering)
    first = session.log.calls[0]
    given = engine.requests[1]["input_ids"]
    assert given[first.prompt_length : first.length] == sampled
    [trace] = session.build().traces
    assert trace.prompt_ids.tolist() + trace.response_ids.tolist() == given + session.log.calls[1].ids.tolist()


def test_an_engine_that_renders_gives_two_traces_with_its_own_contexts(
    engine: ScriptedEngine, chat_proxy: RunningProxy, rendering: Rendering
) -> None:
    session = chat_proxy.open()
    two_turns(session, engine, rendering)
    log, built = session.log, session.build()
    assert len(built.traces) == 2
    for trace, call in zip(built.traces, log.calls, strict=True):
        np.testing.assert_array_equal(trace.prompt_ids, log.prompt_ids(call))
    assert built.tokens.trainable == built.tokens.sampled
