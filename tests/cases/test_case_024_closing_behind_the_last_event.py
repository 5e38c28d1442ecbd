"""Case 24: a client that closes its socket right behind the terminal event has had its answer, 1,000 times of 1,000."""

from __future__ import annotations

import json
import socket

import pytest

from dialects import body
from peers.engine import ScriptedEngine
from running_proxy import RunningProxy

DIALECTS = [
    ("/v1/chat/completions", b"data: [DONE]"),
    ("/v1/responses", b"event: response.completed"),
    ("/v1/messages", b"event: message_stop"),
    ("/v1beta/models/policy:streamGenerateContent?alt=sse", b"finishReason"),
]
ROUNDS = 250


@pytest.mark.parametrize(("path", "terminal"), DIALECTS)
def test_scored_at_once_every_turn_is_there_and_delivered(
    engine: ScriptedEngine, proxy: RunningProxy, path: str, terminal: bytes
) -> None:
    data = json.dumps(body("go", max_tokens=9, stream=True)).encode()
    host, _, port = proxy.url.removeprefix("http://").partition(":")
    delivered = 0
    for _ in range(ROUNDS):
        session = proxy.open()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(data)}\r\n\r\n"
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(head.encode() + data)
            seen = b""
            while terminal not in seen:
                seen += sock.recv(65536)
        record, log = session.end()
        assert record.completions == 1
        delivered += sum(call.delivered for call in log.calls)
    assert delivered == ROUNDS
