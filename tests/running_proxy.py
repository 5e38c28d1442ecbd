"""A real model proxy on real sockets, in a thread with its own loop; what it recorded is read back from the file."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import httpx
import pytest

from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer
from polar.protocols import Engine, EngineFacts, Rendering
from polar.proxy import Attempt, ModelProxy, RunRecord, load_rendering, make_engine
from polar.records import BuildResult
from polar.requests import AgentSpec, ExecInput, StrategySpec, TaskRequest
from polar.sessionlog import LogWriter, SessionLog, read
from polar.trajectory.prefix_merging import PrefixMerging

T = TypeVar("T")


class OpenSession:
    """An attempt that may call the model. `end` closes and seals it."""

    def __init__(self, house: RunningProxy, key: str, log: LogWriter) -> None:
        self._house = house
        self.key = key
        self.path = log.path
        self._log = log

    @property
    def url(self) -> str:
        return self._house.url

    def post(self, document: dict[str, Any], path: str = "/v1/chat/completions", **headers: str) -> httpx.Response:
        """Headers are written with underscores."""
        named = {name.replace("_", "-"): text for name, text in headers.items()}
        auth = {"Authorization": f"Bearer {self.key}"} | named
        return httpx.post(self.url + path, content=json.dumps(document), headers=auth, timeout=120, trust_env=False)

    def turn(self, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
        """One chat completion; the answer is appended to `messages` as a client does."""
        answer = self.post({"model": "policy", "messages": messages, **fields})
        assert answer.status_code == 200, answer.text
        messages.append(answer.json()["choices"][0]["message"])
        return messages[-1]

    @property
    def log(self) -> SessionLog:
        """As far as it is written."""
        return read(self.path)

    def lose_log(self) -> None:
        """As if its file took no more."""
        self._log.close()

    def end(self) -> tuple[RunRecord, SessionLog]:
        record = self._house.run(self._house.proxy.close(self.key))
        self._log.seal()
        return record, read(self.path)

    def build(self) -> BuildResult:
        return PrefixMerging(StrategySpec()).build(self.log)


class RunningProxy:
    def __init__(self, loop: asyncio.AbstractEventLoop, proxy: ModelProxy, url: str, folder: Path) -> None:
        self.proxy, self.url = proxy, url
        self._loop, self._folder = loop, folder
        self._numbers = itertools.count(1)

    def run(self, step: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(step, self._loop).result(60)

    def on_loop(self, function: Callable[[], T]) -> T:
        async def step() -> T:
            return function()

        return self.run(step())

    def open(self, *, session_index: int = 0, attempt: int = 1, **task: Any) -> OpenSession:
        number = next(self._numbers)
        request = make_task(**task)
        names = {"session_id": f"s{number}", "task_id": request.task_id, "attempt": attempt}
        header = self.proxy.header(**names, session_index=session_index, task=request)
        log = LogWriter(self._folder / f"{id(self)}" / f"{number}.log", header)
        key = f"key-{number}"
        attempt = Attempt(**names, session_index=session_index, key=key, task=request, log=log)
        self.on_loop(lambda: self.proxy.open(attempt))
        return OpenSession(self, key, log)

    def listen(self, session: OpenSession) -> str:
        """A listener of the session's own, as a sandbox has it."""
        sock = socket.create_server(("127.0.0.1", 0))
        self.run(self.proxy.listen(session.key, sock))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.contextmanager
def running_proxy(
    folder: Path,
    engine_url: str,
    rendering: Rendering | None,
    *,
    engine: str = "sglang",
    patience: float = 300.0,
    probe: bool = False,
    **options: Any,
) -> Iterator[RunningProxy]:
    """`probe`: made of what the engine's probe finds, as a gateway does it, the rendering too."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def start() -> tuple[ModelProxy, str, Any]:
        made = await make_engine(engine, engine_url, patience)
        settings = {"model": "policy", "context_length": 4096, "grace_seconds": 0.3, "backoff_seconds": 0.01}
        found = rendering
        if probe:
            facts = await _healthy(made)
            settings |= {"context_length": facts.context_length, "logprob_mode": facts.logprob_mode}
            found = load_rendering(facts.tokenizer_path or "") if made.takes_ids and rendering is None else rendering
        proxy = ModelProxy(made, found, **(settings | options))
        return proxy, await proxy.start("127.0.0.1", 0), made

    async def stop() -> None:
        await proxy.stop()
        await made.close()

    proxy, url, made = asyncio.run_coroutine_threadsafe(start(), loop).result(180)
    try:
        yield RunningProxy(loop, proxy, url, folder)
    finally:
        asyncio.run_coroutine_threadsafe(stop(), loop).result(30)
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _healthy(engine: Engine, seconds: float = 120.0) -> EngineFacts:
    """A real engine's first answer may take longer than a probe waits."""
    deadline = time.monotonic() + seconds
    while not (facts := await engine.probe()).healthy:
        assert time.monotonic() < deadline, facts.problem
    return facts


def make_task(**fields: Any) -> TaskRequest:
    agent = AgentSpec(harness="shell", custom_shell=ExecInput(command="true"))
    return TaskRequest(**({"task_id": "t", "instruction": "do it", "agent": agent} | fields))


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    """Polls; fails when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def rendering(tokenizer: Path) -> Rendering:
    return load_rendering(tokenizer)


@pytest.fixture
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer) as made:
        yield made


@pytest.fixture
def proxy(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering) as made:
        yield made


@pytest.fixture
def chat_proxy(tmp_path: Path, engine: ScriptedEngine) -> Iterator[RunningProxy]:
    """Over an engine that renders prompts itself and says which ids it used."""
    with running_proxy(tmp_path, engine.url, None, engine="vllm", context_length=None) as made:
        yield made
