"""Case 35: calls beyond an engine's connections wait in one line for them, and what must get through does."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import aiohttp
import pytest

from dialects import body
from peers.cutter import cutter
from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from polar.proxy.engines import http
from running_proxy import RunningProxy, running_proxy, until

CALLS, CONNECTIONS = 300, 8


async def at_once(proxy: RunningProxy, keys: list[str]) -> list[int]:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:

        async def one(key: str) -> int:
            headers = {"x-api-key": key}
            async with client.post(proxy.url + "/v1/chat/completions", json=body("go"), headers=headers) as answer:
                return answer.status

        return await asyncio.gather(*map(one, keys))


def test_all_are_answered_over_the_connections_there_are(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "POOL", CONNECTIONS)
    engine.script(*[{"text": "ok", "hold": True}] * CALLS)
    with (
        cutter(engine.url) as wire,
        running_proxy(tmp_path, wire.url, rendering) as proxy,
        ThreadPoolExecutor() as pool,
    ):
        sessions = [proxy.open() for _ in range(CALLS)]
        asking = pool.submit(asyncio.run, at_once(proxy, [session.key for session in sessions]))
        until(lambda: all(session.log.calls for session in sessions), 60)
        until(lambda: len(engine.requests) == CONNECTIONS)
        assert wire.connections == CONNECTIONS
        engine.release()
        assert asking.result(120) == [200] * CALLS
        assert len(engine.requests) == CALLS
        assert wire.connections == CONNECTIONS


def test_an_abort_does_not_wait_for_a_connection(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "POOL", 1)
    engine.script({"text": "ok", "hold": True})
    with running_proxy(tmp_path, engine.url, rendering) as proxy, ThreadPoolExecutor() as pool:
        first, second = proxy.open(), proxy.open()
        pool.submit(first.post, body("go"))
        until(lambda: len(engine.requests) == 1)
        waiting = pool.submit(second.post, body("go"))
        until(lambda: len(second.log.calls) == 1)
        first.end()
        assert len(engine.aborted) == 1
        assert waiting.result().status_code == 200


def test_a_line_of_waiting_calls_is_not_taken_for_a_dead_engine(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It answers /health while all its connections are taken."""
    monkeypatch.setattr(http, "POOL", 1)
    engine.script({"text": "ok", "hold": True})
    with running_proxy(tmp_path, engine.url, rendering, patience=2.0) as proxy:
        session = proxy.open()
        answer = session.post(body("go"))
        assert "answers /health" in answer.json()["error"]["message"]
