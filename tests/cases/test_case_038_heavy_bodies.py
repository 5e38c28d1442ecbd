"""Case 38: one session's pictures and long prompts keep no other session waiting: the loop does no heavy work."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy

BUSY_SECONDS = 0.1
"""of the loop's thread in one go; encoding such a prompt there takes more than ten times that"""


class Loop:
    """`busy`: the most that the loop's thread has worked between two of its rounds, whatever else the machine did."""

    def __init__(self) -> None:
        self.busy = 0.0
        self.watching = True

    async def watch(self) -> None:
        while self.watching:
            before = time.thread_time()
            await asyncio.sleep(0)
            self.busy = max(self.busy, time.thread_time() - before)


@contextmanager
def watched(proxy: RunningProxy) -> Iterator[Loop]:
    loop = Loop()
    watching = proxy.on_loop(lambda: asyncio.create_task(loop.watch()))
    try:
        yield loop
    finally:
        loop.watching = False
        proxy.run(asyncio.wait_for(asyncio.shield(watching), 10))


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def post(session: OpenSession, document: dict[str, Any]) -> httpx.Response:
    data, headers = json.dumps(document).encode(), {"x-api-key": session.key}
    url = session.url + "/v1/chat/completions"
    return httpx.post(url, content=data, headers=headers, timeout=120, trust_env=False)


def test_twenty_pictures(proxy: RunningProxy) -> None:
    picture = "data:image/png;base64," + base64.b64encode(os.urandom(750_000)).decode()
    blocks = [{"type": "image_url", "image_url": {"url": picture}}] * 20
    session = proxy.open()
    with watched(proxy) as loop:
        answer = post(session, {"model": "policy", "messages": [user(blocks)]})
    assert answer.status_code == 400
    assert "image" in answer.json()["error"]["message"]
    assert loop.busy < BUSY_SECONDS


def test_a_long_prompt_cold_and_continued(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> None:
    """With these tokens a character is one."""
    text = " ".join(f"word{number}" for number in range(50_000))
    with running_proxy(tmp_path, engine.url, rendering, context_length=None) as proxy:
        session = proxy.open()
        history = [user(text)]
        with watched(proxy) as loop:
            for _ in range(2):
                answer = post(session, {"model": "policy", "messages": history})
                history += [answer.json()["choices"][0]["message"], user("x" * 100_000)]
        _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued"]
    assert log.calls[1].prompt_length > 500_000
    assert loop.busy < BUSY_SECONDS


def test_tokens_of_a_long_prompt_are_counted_aside(proxy: RunningProxy) -> None:
    session = proxy.open()
    document = {"model": "policy", "max_tokens": 1, "messages": [user("word " * 50_000)]}
    with watched(proxy) as loop:
        assert session.post(document, "/v1/messages/count_tokens").json()["input_tokens"] > 250_000
    assert loop.busy < BUSY_SECONDS
