"""The machine among its surroundings: one clock, one store, open requests for work, onlookers.

Whatever is answered to anybody has been saved before.
"""

from __future__ import annotations

import asyncio
import errno
import hmac
import sqlite3
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import structlog

from polar.config import RolloutSettings
from polar.errors import ServerFault
from polar.nodeapi import Lease, WorkReply
from polar.server.deliveries import Courier
from polar.server.events import Onlookers
from polar.server.files import RESERVE_BYTES, Files
from polar.server.machine import Machine
from polar.server.retention import Retention
from polar.server.state import Attempt, Node, Row, Task, key_of
from polar.server.store import Store
from polar.server.tables import Tables

log = structlog.get_logger("polar.server")
TICK_SECONDS = 0.5
_CLOCK_SECONDS, _IDLE_CLOCK_SECONDS = 10.0, 600.0


class DiskFull(ServerFault):
    default_name = "disk_full"


class Core:
    """Raises ConfigError where the data folder cannot be used."""

    def __init__(self, settings: RolloutSettings, token: str) -> None:
        self.settings = settings
        self.token = token
        self.files = Files(Path(settings.save_dir))
        self.store = Store(Path(settings.save_dir))
        self.files.begin()
        self.onlookers = Onlookers()
        self.courier = Courier(settings.callback_timeout_seconds)
        self.retention = Retention(settings, self.store, self.files)
        self._began = time.monotonic() - self.store.at_start(Tables.uptime)
        self._clock_saved = self.now()
        self._flushing = asyncio.Lock()
        self._saving: dict[tuple[str, str, int], Row] = {}
        self.full = self.files.full()
        self._in_use: Counter[str] = Counter()
        self._open_requests: dict[str, asyncio.Future[WorkReply]] = {}
        self.machine = Machine(settings.lease_seconds, settings.delivery_seconds)
        self.machine.refused = self.store.at_start(Tables.refused)
        self.machine.fleet.load(self.store.at_start(Tables.nodes), self.store.at_start(Tables.pause))
        for task in self.store.at_start(Tables.tasks):
            self.machine.adopt(task)
        self.machine.restart(self.now())

    def now(self) -> float:
        """The server's uptime over all its lives, in seconds; no jump of the wall clock moves it."""
        return time.monotonic() - self._began

    def live_nodes(self) -> list[Node]:
        return self.machine.fleet.live(self.now())

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Time passes, callbacks go out, old tasks go while inside; a fault of any of these ends the server."""
        try:
            async with asyncio.TaskGroup() as background:
                work = (self._tick_for_ever(), self.courier.run(self), self.retention.run(self))
                loops = [background.create_task(loop) for loop in work]
                try:
                    yield
                finally:
                    for loop in loops:
                        loop.cancel()
        finally:
            try:
                await self.flush()
            finally:
                self.store.close()

    def close(self) -> None:
        """Ends the requests that are held open, so that the server can stop."""
        self.onlookers.close()
        for node in self.machine.fleet.nodes.values():
            node.asking = None
        for request in self._open_requests.values():
            if not request.done():
                request.set_result(WorkReply())

    # Saving

    async def settle(self) -> None:
        """After every event: hands out work, saves, and tells those who wait."""
        leases: dict[str, list[Attempt]] = {}
        if not self.full:
            for attempt in self.machine.place(self.now()):
                leases.setdefault(attempt.node_id, []).append(attempt)
        self._answer(leases)
        due, self.machine.owed.due = self.machine.owed.due, []
        events, self.machine.events = self.machine.events, []
        try:
            await self.flush()
        except BaseException:  # a cancellation too must not lose what is to be told
            self.machine.owed.due, self.machine.events = due + self.machine.owed.due, events + self.machine.events
            raise
        for kind, data in events:
            self.onlookers.tell(kind, data)
        for delivery in due:
            self.courier.send(delivery)

    async def flush(self) -> None:
        """Returns when everything that has happened is on disk. Raises DiskFull, or sqlite3.Error."""
        async with self._flushing:
            if not self.machine.dirty:
                return
            rows = self._saving = self.machine.dirty
            self.machine.dirty = {}
            for row in rows.values():
                if isinstance(row, Task):
                    row.updated_at = time.time()
            try:
                await self.store.commit(rows.values(), self.now())
            except BaseException as error:
                self.machine.dirty = rows | self.machine.dirty
                if is_disk_full(error):
                    raise DiskFull(f"the disk of {self.files.folder} is full") from error
                raise
            finally:
                self._saving = {}

    async def select(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Rows as they are on disk, which is as they are, unless the disk is full."""
        with suppress(DiskFull):
            await self.flush()
        return await self.store.select(sql, values)

    async def saved(self, task: Task) -> None:
        """Returns when what the task is now is on disk, so that it may be told. Raises DiskFull, or sqlite3.Error."""
        try:
            await self.flush()
        except DiskFull:
            if self._unsaved(task):
                raise

    def _unsaved(self, task: Task) -> bool:
        return any(key_of(row) in self.machine.dirty or key_of(row) in self._saving for row in task.rows)

    # Tasks

    async def task(self, task_id: str) -> Task | None:
        """The task, brought back from disk if it had been put away."""
        if task_id not in self.machine.tasks:
            saved = await self.store.task(task_id)
            if saved is not None and task_id not in self.machine.tasks and task_id not in self.retention.going:
                self.machine.adopt(saved)
        return self.machine.tasks.get(task_id)

    async def task_of(self, session_id: str) -> Task | None:
        session = self.machine.sessions.get(session_id)
        if session is not None:
            return self.machine.tasks[session.task_id]
        rows = await self.store.select("SELECT task_id FROM sessions WHERE session_id = ?", (session_id,))
        return await self.task(rows[0][0]) if rows else None

    @contextmanager
    def using(self, task_id: str) -> Iterator[None]:
        """The task stays in memory, and so its files on disk."""
        self._in_use[task_id] += 1
        try:
            yield
        finally:
            self._in_use[task_id] -= 1

    def put_away(self, task_id: str) -> bool:
        """True when the task is on disk alone: it is over, saved, and nobody uses it."""
        task = self.machine.tasks.get(task_id)
        if task is None:
            return True
        if not task.over or self._in_use[task_id] or self._unsaved(task):
            return False
        del self._in_use[task_id]
        self.machine.forget(task)
        return True

    def no_room(self) -> str | None:
        """Why no new task is taken, and what to do; None where there is room."""
        folder, free = self.files.folder, self.files.free_bytes()
        if free < RESERVE_BYTES:
            return (
                f"no room for new tasks: the disk of {folder} is full ({free >> 20} MiB are left; the last "
                f"{RESERVE_BYTES >> 20} are for what runs). Make room there; rollout.retain_gb bounds what is kept"
            )
        if self.retention.exceeded:
            return (
                f"no room for new tasks: {folder} is full: it holds more than rollout.retain_gb = "
                f"{self.settings.retain_gb:g}, and what runs or ended in the last {self.settings.delivery_seconds:g} s "
                "is kept. Wait, or raise it"
            )
        return None

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._look_at_disk()
            self.machine.tick(self.now())
            try:
                await self.settle()
                await self._save_clock()
            except (DiskFull, sqlite3.Error) as error:
                log.error("cannot save", why=str(error))
            for task in [task for task in self.machine.tasks.values() if task.over]:
                self.put_away(task.task_id)

    def _look_at_disk(self) -> None:
        """Nothing is begun for whose end there is no room. A folder that has gone may come back, as a mount does."""
        try:
            problem = f"less than {RESERVE_BYTES >> 20} MiB are left" if self.files.full() else None
        except OSError as error:
            problem = str(error)
        if problem is not None and not self.full:
            log.error("no new tasks are taken, and no sessions begun", folder=str(self.files.folder), why=problem)
        elif problem is None and self.full:
            log.info("there is room again", folder=str(self.files.folder))
        self.full = problem is not None

    async def _save_clock(self) -> None:
        if self.now() - self._clock_saved > (_CLOCK_SECONDS if self.machine.tasks else _IDLE_CLOCK_SECONDS):
            self._clock_saved = self.now()
            await self.store.commit([], self.now())

    # Work

    def hold_open(self, node: Node) -> asyncio.Future[WorkReply]:
        """The node's request for work; an older one of the same node is answered with nothing."""
        older = self._open_requests.get(node.node_id)
        if older is not None and not older.done():
            older.set_result(WorkReply())
        request: asyncio.Future[WorkReply] = asyncio.get_running_loop().create_future()
        self._open_requests[node.node_id] = request
        return request

    def let_go(self, node: Node, request: asyncio.Future[WorkReply]) -> None:
        if self._open_requests.get(node.node_id) is request:
            del self._open_requests[node.node_id]
            node.asking = None

    def _answer(self, leases: dict[str, list[Attempt]]) -> None:
        for node_id, request in self._open_requests.items():
            node = self.machine.fleet.nodes[node_id]
            taken = leases.get(node_id, [])
            if request.done() or not (taken or node.cancels or node.untold):
                continue
            reply = WorkReply(leases=list(map(self.lease, taken)), cancels=node.cancels, orders=node.untold)
            node.cancels, node.untold, node.asking = [], [], None
            request.set_result(reply)

    def lease(self, attempt: Attempt) -> Lease:
        session = self.machine.sessions[attempt.session_id]
        return Lease(
            session_id=attempt.session_id,
            session_index=session.index,
            attempt=attempt.number,
            key=self._key(attempt),
            lease_seconds=self.machine.leases.seconds,
            queued_seconds=self.machine.queue_clock(self.now()) - session.queued_at,
            task=self.machine.tasks[session.task_id].document,
        )

    def _key(self, attempt: Attempt) -> str:
        """Names its attempt, and cannot be guessed without the control token."""
        name = f"{attempt.session_id}.{attempt.number}"
        return f"polar-{name}.{hmac.new(self.token.encode(), name.encode(), sha256).hexdigest()}"


def is_disk_full(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    return isinstance(error, sqlite3.OperationalError) and error.sqlite_errorcode == sqlite3.SQLITE_FULL
