"""The bridge's worker: an event loop in a thread of its own that outlives single calls of the rollout function.

What goes wrong in it is raised in the trainer's thread; closing it cancels its tasks on the server.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, TypeVar

import aiohttp

from polar.client import AsyncClient
from polar.errors import ConfigError
from slime_bridge.config import PolarSlimeConfig, router_url
from slime_bridge.engine import engine_version
from slime_bridge.evaluation import evaluate
from slime_bridge.groups import Collected, Groups
from slime_bridge.preflight import check_args, check_server
from slime_bridge.slime_types import RolloutFnEvalOutput
from slime_bridge.tasks import Tasks, cancel_earlier_run, running_tasks

T = TypeVar("T")
CLOSE_SECONDS = 10.0


class Worker:
    """Started at once. Raises ConfigError where args or the server's state would make every rollout fail."""

    def __init__(self, args: Any, config: PolarSlimeConfig, source: Any) -> None:
        check_args(args, config)
        self.config, self.source = config, source
        self._args = args
        self._run_id = secrets.token_hex(4)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._rooms: Future[_Rooms] = Future()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polar-bridge", daemon=True)
        self._thread.start()
        self._life = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        try:
            self._first_of(self._rooms)
        except BaseException:
            self._stop()
            raise

    def collect(self, rollout_id: int) -> Collected:
        return self._call(self._collect(rollout_id))

    def evaluate(self, rollout_id: int) -> RolloutFnEvalOutput:
        rooms = self._rooms.result()
        return self._call(evaluate(self._args, self.config, rooms.tasks, rollout_id, self._run_id))

    def close(self) -> None:
        """Cancels what is in flight, on the server too, and ends the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        wait([self._life], timeout=CLOSE_SECONDS)
        self._stop()

    async def _live(self) -> None:
        config = self.config
        async with (
            AsyncClient(config.rollout_url, timeout=config.request_timeout) as client,
            aiohttp.ClientSession(trust_env=False) as http,
        ):
            await check_server(client, config)
            await cancel_earlier_run(client, getattr(self._args, "save", None), self._run_id)
            seconds = config.weight_update_pause_timeout
            async with running_tasks(client, config.callback_host, seconds) as tasks, asyncio.TaskGroup() as background:
                groups = Groups(self._args, config, self.source, tasks, background, self._run_id)
                self._rooms.set_result(_Rooms(tasks, groups, http))
                await self._closing.wait()
                tasks.cancel_seconds = 0.0
                groups.close()

    async def _collect(self, rollout_id: int) -> Collected:
        rooms = self._rooms.result()
        version = await engine_version(rooms.http, router_url(self._args))
        return await rooms.groups.collect(rollout_id, version)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        return self._first_of(asyncio.run_coroutine_threadsafe(work, self._loop))

    def _first_of(self, wanted: Future[T]) -> T:
        """The result that is wanted, or the fault that ended the worker's life before it came."""
        both: list[Future[Any]] = [wanted, self._life]
        wait(both, return_when=FIRST_COMPLETED)
        if not wanted.done():
            wanted.cancel()
            self._life.result()
            raise ConfigError("the bridge's worker is closed")
        return wanted.result()

    def _stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()


class _Rooms:
    def __init__(self, tasks: Tasks, groups: Groups, http: aiohttp.ClientSession) -> None:
        self.tasks, self.groups, self.http = tasks, groups, http
