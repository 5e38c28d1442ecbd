"""Case 23: a client that gives up and retries the same bytes is one call and one chain; else they are a new sample."""

from __future__ import annotations

import json
import socket

import pytest

from peers.engine import ScriptedEngine
from running_proxy import OpenSession, RunningProxy, until, user


def drop_the_answer(session: OpenSession, data: bytes, engine: ScriptedEngine) -> None:
    host, _, port = session.url.removeprefix("http://").partition(":")
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        until(lambda: len(engine.requests) == 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_retry_is_one_engine_call_and_one_chain(engine: ScriptedEngine, proxy: RunningProxy, stream: bool) -> None:
    engine.script({"text": "first", "hold": True}, {"text": "second"}, {"text": "sample a"}, {"text": "sample b"})
    session = proxy.open()
    asked = {"model": "policy", "messages": [user("go")], "stream": stream}
    drop_the_answer(session, json.dumps(asked).encode(), engine)
    engine.release()
    retried = session.post(asked, x_stainless_retry_count="1")
    assert retried.status_code == 200
    assert len(engine.requests) == 1
    messages = [user("go"), {"role": "assistant", "content": "first"}, user("on")]
    session.turn(messages)
    # The same bytes once more, as new calls: two samples.
    again = [user("again")]
    session.turn(list(again))
    session.turn(list(again))
    _, log = session.end()
    assert [(call.joined, call.delivered) for call in log.calls] == [(1, True), *[(0, True)] * 3]
    built = session.build()
    assert [trace.metadata["calls"] for trace in built.traces] == [[1, 2], [3], [4]]
    assert built.tokens.trainable == built.tokens.sampled
    assert built.calls.joined == 1
