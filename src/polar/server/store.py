"""What the server owes survives a kill −9: one thread writes, each batch in one transaction; looks hold up no write."""

from __future__ import annotations

import asyncio
import fcntl
import sqlite3
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import msgspec

from polar.errors import ConfigError
from polar.server.state import Task
from polar.server.tables import Tables

P = ParamSpec("P")
T = TypeVar("T")


class Store:
    """`<folder>/polar.db`, of one server at a time. Raises ConfigError where it cannot be used."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._lock = (folder / "lock").open("w")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"another rollout server uses the folder {folder}: give this one its own") from error
        self._writer = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polar-store")
        self._tables = self._writer.submit(Tables, str(folder / "polar.db")).result()
        self._looker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="polar-look")
        read_only = f"{(folder / 'polar.db').resolve().as_uri()}?mode=ro"
        self._look = self._looker.submit(sqlite3.connect, read_only, uri=True).result()

    def at_start(self, read: Callable[[Tables], T]) -> T:
        return self._writer.submit(read, self._tables).result()

    async def task(self, task_id: str) -> Task | None:
        found = await self._run(Tables.tasks, "task_id = ?", (task_id,))
        return found[0] if found else None

    async def select(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Sees every commit that was awaited before."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._looker, lambda: self._look.execute(sql, values).fetchall())

    async def commit(self, rows: Iterable[msgspec.Struct], uptime: float) -> None:
        """The rows as they are now. Raises sqlite3.Error, and then nothing of it is saved."""
        await self._run(Tables.commit, [(type(row), self._tables.values(row)) for row in rows], uptime)

    async def change(self, statements: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """One transaction, of the rows of tasks that are not in memory. Raises sqlite3.Error."""
        await self._run(Tables.change, statements)

    def close(self) -> None:
        for thread, connection in ((self._looker, self._look), (self._writer, self._tables)):
            thread.submit(connection.close).result()
            thread.shutdown()
        self._lock.close()

    async def _run(self, method: Callable[Concatenate[Tables, P], T], *values: P.args, **options: P.kwargs) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, lambda: method(self._tables, *values, **options))
