"""What is over is kept until it is too old, or until the folder holds too much: then the oldest goes first. What the
folder holds is on record; nobody walks it.

Rows go first, in one transaction with a note of whose files they leave; the note goes when the files have gone. So no
kill leaves a task without its files, or a file that nobody will clear away. A file without a note is never touched.
"""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import structlog

from polar.config import RolloutSettings
from polar.errors import ServerFault
from polar.records import Storage
from polar.server.files import Files
from polar.server.store import Store

if TYPE_CHECKING:
    from polar.server.core import Core

log = structlog.get_logger("polar.server")
ROUND_SECONDS = 2.0
_BATCH = 50
_BREATH_SECONDS = 0.05
"""between two batches, for whoever waits for the store"""
_DAY, _GB = 86_400.0, 10**9
_NUMBERS = """
    SELECT (SELECT coalesce(sum(bytes), 0) FROM attempts) + (SELECT coalesce(sum(bytes), 0) FROM discarded)
        + (page_count - freelist_count) * page_size,
        (SELECT count(*) FROM tasks), (SELECT retired_tasks FROM clock)
    FROM pragma_page_count, pragma_freelist_count, pragma_page_size"""
_OLDEST = """
    SELECT task_id, ended_at, length(request) + (
        SELECT coalesce(sum(bytes), 0) FROM sessions s JOIN attempts USING (session_id) WHERE s.task_id = t.task_id)
    FROM tasks t WHERE ended_at <= ? AND task_id NOT IN (SELECT task_id FROM deliveries WHERE state = 'pending')
    ORDER BY ended_at LIMIT ?"""
_NOTE = """
    INSERT INTO discarded SELECT session_id, task_id, count(number), coalesce(sum(bytes), 0)
    FROM sessions LEFT JOIN attempts USING (session_id) WHERE task_id = ? GROUP BY session_id"""
_OF_TASK = "session_id IN (SELECT session_id FROM sessions WHERE task_id = ?)"
_UNMEASURED = """
    SELECT task_id, session_id, number FROM attempts JOIN sessions USING (session_id) WHERE bytes IS NULL LIMIT ?"""


class Retention:
    """`going`: tasks that are being retired; nobody may take them into memory any more. `exceeded`: more is kept than
    should be, and nothing of it may go yet."""

    def __init__(self, settings: RolloutSettings, store: Store, files: Files) -> None:
        self._store, self._files = store, files
        self._grace = settings.delivery_seconds
        self._days = settings.retain_days
        self.limit = int(settings.retain_gb * _GB) if settings.retain_gb is not None else None
        self.going: set[str] = set()
        self.exceeded = False

    async def storage(self, full: bool) -> Storage:
        used, tasks, retired = (await self._store.select(_NUMBERS))[0]
        return Storage(
            used_bytes=used,
            limit_bytes=self.limit,
            free_bytes=self._files.free_bytes(),
            full=full or self.exceeded,
            tasks=tasks,
            retired_tasks=retired,
        )

    async def run(self, core: Core) -> None:
        while True:
            try:
                await self._round(core)
            except (OSError, sqlite3.Error, ServerFault) as error:
                log.error("cannot clear away what is over", why=str(error))
            await asyncio.sleep(ROUND_SECONDS)

    async def _round(self, core: Core) -> None:
        await self._remove_files()
        await self._measure(core)
        await self._store.change([("DELETE FROM refusals WHERE until <= ?", (core.now(),))])
        while True:
            used = (await self.storage(full=False)).used_bytes
            excess = used - self.limit if self.limit is not None else 0
            batch = self._too_much(await self._oldest(core), excess, core.now())
            self.exceeded = excess > 0 and not batch
            if not batch:
                return
            await self._retire(batch)
            await asyncio.sleep(_BREATH_SECONDS)

    async def _oldest(self, core: Core) -> list[tuple[Any, ...]]:
        """Tasks that may go, as (task_id, ended_at, bytes): nobody waits for their callback, nobody reads them."""
        rows = await self._store.select(_OLDEST, (core.now() - self._grace, _BATCH))
        return [row for row in rows if core.put_away(row[0])]

    def _too_much(self, oldest: Sequence[tuple[Any, ...]], excess: int, now: float) -> list[str]:
        too_old = now - self._days * _DAY if self._days is not None else float("-inf")
        batch = []
        for task_id, ended_at, size in oldest:
            if ended_at > too_old and excess <= 0:
                break
            batch.append(task_id)
            excess -= size
        return batch

    async def _retire(self, task_ids: Sequence[str]) -> None:
        self.going.update(task_ids)
        try:
            await self._store.change([statement for task_id in task_ids for statement in _forget(task_id)])
        finally:
            self.going.difference_update(task_ids)
        log.info("retired", tasks=len(task_ids))
        await self._remove_files()

    async def _remove_files(self) -> None:
        rows = "SELECT session_id, task_id, attempts FROM discarded LIMIT ?"
        while notes := await self._store.select(rows, (_BATCH,)):
            await asyncio.to_thread(self._discard, notes)
            await self._store.change([("DELETE FROM discarded WHERE session_id = ?", note[:1]) for note in notes])

    def _discard(self, notes: Sequence[tuple[Any, ...]]) -> None:
        for session_id, task_id, attempts in notes:
            self._files.discard(task_id, session_id, attempts)

    def _sizes(self, attempts: Sequence[tuple[Any, ...]]) -> list[int]:
        return [self._files.size(*row) for row in attempts]

    async def _measure(self, core: Core) -> None:
        """What an older Polar has left without its size."""
        while rows := await self._store.select(_UNMEASURED, (_BATCH,)):
            sizes = await asyncio.to_thread(self._sizes, rows)
            put_away = []
            for size, (_, session_id, number) in zip(sizes, rows, strict=True):
                if session_id in core.machine.sessions:
                    core.machine.stored(core.machine.sessions[session_id], number, size)
                else:
                    put_away.append((size, session_id, number))
            set_size = "UPDATE attempts SET bytes = ? WHERE session_id = ? AND number = ?"
            await self._store.change([(set_size, row) for row in put_away])
            await core.flush()


def _forget(task_id: str) -> list[tuple[str, Sequence[Any]]]:
    return [
        (statement, (task_id,))
        for statement in (
            _NOTE,
            f"DELETE FROM attempts WHERE {_OF_TASK}",
            "DELETE FROM sessions WHERE task_id = ?",
            "DELETE FROM deliveries WHERE task_id = ?",
            "DELETE FROM tasks WHERE task_id = ?",
        )
    ] + [("UPDATE clock SET retired_tasks = retired_tasks + 1", ())]
