"""Case 39: opening a session asks the engine nothing, however many are opened."""

from __future__ import annotations

import time
from pathlib import Path

from peers.cutter import cutter
from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import running_proxy

SESSIONS = 2000


def test_sessions_are_opened_without_a_word_to_the_engine(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering
) -> None:
    with cutter(engine.url) as wire, running_proxy(tmp_path, wire.url, rendering) as proxy:
        before = time.thread_time()
        sessions = [proxy.open() for _ in range(SESSIONS)]
        spent = time.thread_time() - before
        assert wire.connections == 0
        for session in sessions[::100]:
            assert session.turn([{"role": "user", "content": "go"}])["content"] == "ok"
        assert wire.connections <= SESSIONS / 100
    assert spent < 0.01 * SESSIONS
