"""Case 34: whatever headers stand on an engine's answer, packed or doubled, the harness has our own, once and true."""

from __future__ import annotations

import json
import socket
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from dialects import PATHS, STREAMED, body
from peers.engine import ScriptedEngine
from peers.router import router
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy
from streams import of_stream, of_whole

TEXT = "é水 " * 60


@pytest.fixture
def behind(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with router(engine.url) as url, running_proxy(tmp_path, url, rendering) as made:
        yield made


def exchange(session: OpenSession, dialect: str, stream: bool) -> tuple[Counter[str], bytes]:
    """How often each header stands, and the body as it came."""
    path = STREAMED.get(dialect, PATHS[dialect]) if stream else PATHS[dialect]
    data = json.dumps(body("go", max_tokens=900, stream=stream)).encode()
    host, _, port = session.url.removeprefix("http://").partition(":")
    head = f"POST {path} HTTP/1.0\r\nx-api-key: {session.key}\r\nAccept-Encoding: gzip\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + f"Content-Length: {len(data)}\r\n\r\n".encode() + data)
        answer = b"".join(iter(lambda: sock.recv(65536), b""))
    said, _, rest = answer.partition(b"\r\n\r\n")
    status, *lines = said.decode().split("\r\n")
    assert " 200 " in status
    headers = dict(line.lower().split(": ", 1) for line in lines)
    assert int(headers.get("content-length", len(rest))) == len(rest)
    return Counter(line.lower().partition(":")[0] for line in lines), rest


@pytest.mark.parametrize("dialect", list(PATHS))
@pytest.mark.parametrize("stream", [False, True])
def test_the_answer_is_whole_and_its_headers_are_its_own(
    engine: ScriptedEngine, behind: RunningProxy, dialect: str, stream: bool
) -> None:
    engine.script({"text": TEXT})
    session = behind.open()
    headers, data = exchange(session, dialect, stream)
    said = of_stream(dialect, data) if stream else of_whole(dialect, json.loads(data))
    assert said.text == TEXT
    assert max(headers.values()) == 1
    assert "content-encoding" not in headers
    assert session.end()[1].calls[0].delivered
