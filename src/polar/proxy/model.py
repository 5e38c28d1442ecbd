"""The model proxy: every harness's model, one engine behind it. A key works from `open` to `close`, and never again."""

from __future__ import annotations

import hmac
import socket
import time
from typing import Any, Literal

from aiohttp import web

from polar.config import PriceSettings
from polar.errors import ConfigError, ServerFault
from polar.protocols import Engine, EngineFacts, Rendering
from polar.proxy.gate import Gate
from polar.proxy.server import Find, make_app
from polar.proxy.session import Attempt, RunRecord, Session, Shared
from polar.proxy.transport import Runner
from polar.records import LogprobMode
from polar.requests import TaskRequest
from polar.sessionlog import Header

# Clients of a session that has ended are dead or not worth waiting for.
_CLOSE_SECONDS = 0.5


class ModelProxy:
    """`context_length` None: the engine's bound is not known, and the engine itself refuses what does not fit.
    `logprob_mode`: as the engine's probe found it; None: not known.
    `prices` are needed by tasks with limits.cost alone."""

    def __init__(
        self,
        engine: Engine,
        rendering: Rendering | None,
        *,
        model: str,
        context_length: int | None,
        logprob_mode: LogprobMode | None = LogprobMode.SAMPLING_TEMPERATURE,
        prices: PriceSettings | None = None,
        grace_seconds: float = 15.0,
        backoff_seconds: float = 1.0,
        keep_alive_seconds: float = 10.0,
    ) -> None:
        if engine.takes_ids and rendering is None:
            raise ConfigError("this engine takes token ids: give the folder of its tokenizer")
        self._gate = Gate()
        self._shared = Shared(
            engine=engine,
            rendering=rendering,
            gate=self._gate,
            model=model,
            context_length=context_length,
            prices=prices,
            grace_seconds=grace_seconds,
            backoff_seconds=backoff_seconds,
        )
        self._logprob_mode = logprob_mode
        self._keep_alive = keep_alive_seconds
        self._sessions: dict[str, Session] = {}
        self._runners: dict[str, web.AppRunner] = {}
        self._shared_runner: web.AppRunner | None = None

    async def start(self, host: str, port: int, routes: list[web.RouteDef] | None = None) -> str:
        """The shared listener: `routes` of its owner, then the proxy's, which need a key. Returns its base URL."""
        self._shared_runner = runner = await self._runner(self._by_key, routes)
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
        address = runner.addresses[0]
        shown = f"[{address[0]}]" if ":" in address[0] else address[0]
        return f"http://{shown}:{address[1]}"

    def header(self, *, session_id: str, task_id: str, attempt: int, session_index: int, task: TaskRequest) -> Header:
        """What a log of an attempt under this proxy starts with."""
        rendering = self._shared.rendering
        return Header(
            session_id=session_id,
            task_id=task_id,
            attempt=attempt,
            session_index=session_index,
            model=self._shared.model,
            engine=self._shared.engine.kind,
            tokenizer=rendering.name if rendering else None,
            tokenizer_sha256=rendering.sha256 if rendering else None,
            sampling=task.sampling.model_dump(exclude_none=True),
            logprob_mode=self._logprob_mode,
            reasoning=task.reasoning,
            created_at=time.time(),
        )

    def open(self, attempt: Attempt) -> None:
        """The key is valid from now on. Raises TaskFault for a limit that cannot be kept."""
        if attempt.key in self._sessions:
            raise ServerFault(f"the key of session {attempt.session_id} is in use")
        self._sessions[attempt.key] = Session(attempt, self._shared)

    async def listen(self, key: str, sock: socket.socket) -> None:
        """Serves the proxy's routes alone on a listening socket: who calls here is the attempt of `key`."""

        def find(given: str | None) -> Session | None:
            own = given is None or hmac.compare_digest(given.encode(errors="surrogateescape"), key.encode())
            return self._sessions.get(key) if own else None

        self._runners[key] = runner = await self._runner(find)
        await web.SockSite(runner, sock).start()

    async def close(self, key: str) -> RunRecord:
        """Ends the attempt: no call after this, none in flight when it returns, its listener closed."""
        session = self._sessions.pop(key)
        record = await session.close()
        runner = self._runners.pop(key, None)
        if runner is not None:
            await runner.cleanup()
        return record

    def sampled(self, key: str) -> int:
        """Tokens sampled in an open attempt so far."""
        return self._sessions[key].record.sampled

    async def pause(self, mode: Literal["drain", "abort"], timeout_seconds: float) -> bool:
        """No engine call starts from now on. True when none runs any more; else it has resumed by itself."""
        return await self._gate.pause(mode, timeout_seconds)

    async def probe(self) -> EngineFacts | None:
        """The engine's, once nothing is paused; None when a pause cut it short."""
        return await self._gate.run(self._shared.engine.probe(), call=False)

    def resume(self) -> None:
        self._gate.resume()

    def status(self) -> dict[str, Any]:
        engine = self._shared.engine
        return {
            "paused": self._gate.paused,
            "inflight": self._gate.running,
            "base_url": engine.base_url,
            "engine": engine.kind,
        }

    def paused_seconds(self) -> float:
        """Time spent paused since the proxy was made."""
        return self._gate.paused_seconds

    async def stop(self) -> None:
        """Closes every attempt and every listener. The engine stays its owner's."""
        for key in list(self._sessions):
            await self.close(key)
        if self._shared_runner is not None:
            await self._shared_runner.cleanup()

    async def _runner(self, find: Find, routes: list[web.RouteDef] | None = None) -> web.AppRunner:
        app = make_app(find, self._shared.model, keep_alive=self._keep_alive, routes=routes)
        runner = Runner(app, handler_cancellation=True, shutdown_timeout=_CLOSE_SECONDS)
        await runner.setup()
        return runner

    def _by_key(self, key: str | None) -> Session | None:
        return self._sessions.get(key) if key else None
