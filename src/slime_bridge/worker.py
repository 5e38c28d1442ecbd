"""The bridge's worker: an event loop in a thread of its own that outlives single calls of the rollout function.

What goes wrong in it is raised in the trainer's thread; closing it cancels its tasks on the server, whatever runs.
"""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Coroutine
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import Any, NoReturn, TypeVar

import aiohttp

from polar.client import AsyncClient
from slime_bridge.colocation import Engines
from slime_bridge.config import PolarSlimeConfig, router_url
from slime_bridge.engine import engine_version
from slime_bridge.evaluation import evaluate
from slime_bridge.groups import CLOSED, BridgeFault, Collected, Groups
from slime_bridge.preflight import check_args, colocated
from slime_bridge.preflight_server import check_callback, check_server
from slime_bridge.slime_types import RolloutFnEvalOutput
from slime_bridge.tasks import Tasks, cancel_at_once, cancel_earlier_run, running_tasks

T = TypeVar("T")
CLOSE_SECONDS = 10.0


class Worker:
    """Started at once. Raises ConfigError where args or the server's state would make every rollout fail."""

    def __init__(self, args: Any, config: PolarSlimeConfig, source: Any) -> None:
        check_args(args)
        self.config, self.source = config, source
        self._args = args
        self._run_id = secrets.token_hex(4)
        self._loop = asyncio.new_event_loop()
        self._closing = asyncio.Event()
        self._ending = threading.Event()
        self._rooms: Future[_Rooms] = Future()
        self._thread = threading.Thread(target=self._loop.run_forever, name="polar-bridge", daemon=True)
        self._thread.start()
        self._life = asyncio.run_coroutine_threadsafe(self._live(), self._loop)
        try:
            self._first_of(self._rooms)
        except BaseException:
            self.close()
            raise

    def use(self, args: Any) -> None:
        """From the next call on; of a trainer that sends its args anew with each. What is checked stays as it was."""
        self._args = self._rooms.result().groups.args = args

    def collect(self, rollout_id: int) -> Collected:
        return self._call(self._collect(rollout_id))

    def evaluate(self, rollout_id: int) -> RolloutFnEvalOutput:
        return self._call(self._evaluate(rollout_id))

    def close(self) -> None:
        """Cancels what is in flight, on the server too, and ends the thread."""
        self._loop.call_soon_threadsafe(self._closing.set)
        if not self._rooms.done():
            self._life.cancel()
        wait([self._life], timeout=CLOSE_SECONDS)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSE_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()
        if self._rooms.done() and (left := self._rooms.result().tasks.left):
            cancel_at_once(self.config.rollout_url, left, CLOSE_SECONDS)

    async def _live(self) -> None:
        config = self.config
        seconds = config.weight_update_pause_timeout
        async with (
            AsyncClient(config.rollout_url, timeout=config.request_timeout) as client,
            aiohttp.ClientSession(trust_env=False) as http,
        ):
            await check_server(client, self._args, config)
            await cancel_earlier_run(client, getattr(self._args, "save", None), self._run_id)
            async with running_tasks(client, config.callback_host, seconds) as tasks:
                await check_callback(tasks, config, self._run_id)
                async with asyncio.TaskGroup() as background:
                    groups = Groups(self._args, config, self.source, tasks, background, self._run_id)
                    engines = Engines(client, seconds, background, colocated=colocated(self._args))
                    self._rooms.set_result(_Rooms(tasks, groups, engines, http))
                    try:
                        await self._closing.wait()
                    finally:
                        self._ending.set()
                        tasks.leave()
                        groups.end()
                        engines.close()

    async def _collect(self, rollout_id: int) -> Collected:
        rooms = self._rooms.result()
        async with rooms.engines.awake():
            version = await engine_version(rooms.http, router_url(self._args))
            return await rooms.groups.collect(rollout_id, version)

    async def _evaluate(self, rollout_id: int) -> RolloutFnEvalOutput:
        rooms = self._rooms.result()
        async with rooms.engines.awake():
            return await evaluate(self._args, self.config, rooms.tasks, rollout_id, self._run_id)

    def _call(self, work: Coroutine[Any, Any, T]) -> T:
        if self._life.done():
            work.close()
            self._tell_end()
        called = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return self._first_of(called)
        except BaseException:
            called.cancel()  # whoever called has been interrupted; nothing of the call goes on
            raise

    def _first_of(self, wanted: Future[T]) -> T:
        """The result that is wanted, or the fault that ended the worker's life: what it breaks besides is no news."""
        both: list[Future[Any]] = [wanted, self._life]
        wait(both, return_when=FIRST_COMPLETED)
        if self._ending.is_set():
            wait([self._life], timeout=CLOSE_SECONDS)
        if self._life.done() and (not wanted.done() or wanted.cancelled() or wanted.exception() is not None):
            self._tell_end()
        return _result(wanted)

    def _tell_end(self) -> NoReturn:
        _result(self._life)
        raise BridgeFault(CLOSED)


def _result(ended: Future[T]) -> T:
    try:
        return ended.result()
    except BaseExceptionGroup as faults:
        raise _first(faults) from faults


def _first(fault: BaseException) -> BaseException:
    return _first(fault.exceptions[0]) if isinstance(fault, BaseExceptionGroup) else fault


class _Rooms:
    def __init__(self, tasks: Tasks, groups: Groups, engines: Engines, http: aiohttp.ClientSession) -> None:
        self.tasks, self.groups, self.engines, self.http = tasks, groups, engines, http
