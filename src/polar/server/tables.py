"""The server's rows in SQLite. The schema has a version: an older database is migrated, a newer one refused."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from polar.errors import ConfigError
from polar.server.state import Attempt, Delivery, ForgottenNode, Node, Pause, Refusal, Session, Task

MIGRATIONS = [
    """
    CREATE TABLE clock (uptime REAL NOT NULL);
    INSERT INTO clock VALUES (0);
    CREATE TABLE tasks (
        task_id TEXT PRIMARY KEY, digest TEXT NOT NULL, request TEXT NOT NULL, status TEXT NOT NULL,
        priority INTEGER, max_attempts INTEGER, queue_seconds REAL, enough INTEGER, runtime TEXT, harness TEXT,
        model TEXT, graded INTEGER, callback_url TEXT, callback_format TEXT, num_samples INTEGER,
        completed_sessions INTEGER, errored_sessions INTEGER, mean_reward REAL, mean_traces REAL,
        mean_completions REAL, created_at REAL, updated_at REAL, source TEXT, error TEXT);
    CREATE INDEX tasks_by_status ON tasks (status);
    CREATE INDEX tasks_by_age ON tasks (created_at);
    CREATE TABLE sessions (
        session_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, "index" INTEGER, status TEXT, queued_at REAL,
        termination TEXT, fault TEXT, error TEXT, winner INTEGER, node_id TEXT, reward REAL,
        traces INTEGER, completions INTEGER, usable INTEGER, stopping TEXT, timing TEXT);
    CREATE INDEX sessions_by_task ON sessions (task_id);
    CREATE TABLE attempts (
        session_id TEXT, number INTEGER, node_id TEXT, epoch INTEGER, leased_at REAL, expires_at REAL, state TEXT,
        sampled_tokens INTEGER, fault TEXT, log_sha256 TEXT, PRIMARY KEY (session_id, number));
    CREATE TABLE deliveries (
        delivery_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, url TEXT, due_at REAL, deadline REAL, state TEXT,
        tries INTEGER, error TEXT);
    CREATE INDEX deliveries_by_task ON deliveries (task_id);
    CREATE INDEX deliveries_by_state ON deliveries (state);
    CREATE TABLE nodes (
        node_id TEXT PRIMARY KEY, epoch INTEGER, gateway_url TEXT, workers TEXT, engine TEXT, runtimes TEXT,
        harnesses TEXT, heartbeat_interval_seconds REAL, draining INTEGER, last_heartbeat REAL);
    """,
    """
    ALTER TABLE tasks ADD COLUMN needs TEXT NOT NULL DEFAULT '{}';
    CREATE TABLE pauses (
        id INTEGER PRIMARY KEY, order_id TEXT, mode TEXT, began REAL, until REAL, stood REAL);
    """,
    """
    ALTER TABLE tasks ADD COLUMN ended_at REAL;
    UPDATE tasks SET ended_at = (SELECT uptime FROM clock) WHERE status IN ('completed', 'failed', 'cancelled');
    CREATE INDEX tasks_by_end ON tasks (ended_at);
    ALTER TABLE attempts ADD COLUMN bytes INTEGER;
    CREATE INDEX attempts_by_bytes ON attempts (bytes);
    CREATE TABLE refusals (task_id TEXT PRIMARY KEY, until REAL NOT NULL);
    CREATE TABLE discarded (
        session_id TEXT PRIMARY KEY, task_id TEXT NOT NULL, attempts INTEGER NOT NULL, bytes INTEGER NOT NULL);
    ALTER TABLE clock ADD COLUMN retired_tasks INTEGER NOT NULL DEFAULT 0;
    """,
]
_TABLES: dict[type[msgspec.Struct], str] = {
    Task: "tasks",
    Session: "sessions",
    Attempt: "attempts",
    Delivery: "deliveries",
    Node: "nodes",
    Pause: "pauses",
    Refusal: "refusals",
}
OPEN_TASKS = (
    "task_id IN (SELECT task_id FROM tasks WHERE status IN ('running', 'cancelling') "
    "UNION SELECT task_id FROM deliveries WHERE state = 'pending')"
)
_JSON_COLUMNS = frozenset({"timing", "workers", "engine", "runtimes", "harnesses", "needs"})
_LOG_BYTES = 16 << 20
"""to which the write-ahead log shrinks after a large task"""
S = TypeVar("S", bound=msgspec.Struct)


class Tables:
    """One connection; `path` may be ":memory:". Raises ConfigError where the database cannot be used."""

    def __init__(self, path: str) -> None:
        try:
            self._db = sqlite3.connect(path, isolation_level=None)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
            self._migrate(path)
        except sqlite3.DatabaseError as error:
            raise ConfigError(f"the server's database {path} cannot be used: {error}") from error
        self._columns = {
            kind: [row[1] for row in self.select(f"PRAGMA table_info({table})")] for kind, table in _TABLES.items()
        } | {ForgottenNode: ["node_id"]}

    def _migrate(self, path: str) -> None:
        self._db.execute("CREATE TABLE IF NOT EXISTS migrations (version INTEGER PRIMARY KEY)")
        done = self.select("SELECT coalesce(max(version), 0) FROM migrations")[0][0]
        if done > len(MIGRATIONS):
            raise ConfigError(f"{path} was written by a newer Polar (schema {done}, known {len(MIGRATIONS)}): update")
        for version, script in enumerate(MIGRATIONS[done:], done + 1):
            self._db.executescript(f"BEGIN; {script}; INSERT INTO migrations VALUES ({version}); COMMIT")

    def select(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        return self._db.execute(sql, values).fetchall()

    def values(self, row: msgspec.Struct) -> tuple[Any, ...]:
        """The row as its table's columns."""
        values = (getattr(row, column) for column in self._columns[type(row)])
        return tuple(
            msgspec.json.encode(value).decode() if isinstance(value, msgspec.Struct | list) else value
            for value in values
        )

    def commit(self, batch: Iterable[tuple[type[msgspec.Struct], tuple[Any, ...]]], uptime: float) -> None:
        """The rows as they are now, in one transaction."""
        rows = ((_saving(kind, row), row) for kind, row in batch)
        self.change([*rows, ("UPDATE clock SET uptime = ?", (uptime,))])

    def change(self, statements: Iterable[tuple[str, Sequence[Any]]]) -> None:
        """One transaction. Raises sqlite3.Error, and then nothing of it is saved."""
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for sql, values in statements:
                self._db.execute(sql, values)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def refused(self) -> dict[str, float]:
        return dict(self.select("SELECT task_id, until FROM refusals"))

    def uptime(self) -> float:
        return float(self.select("SELECT uptime FROM clock")[0][0])

    def nodes(self) -> list[Node]:
        return self._read(Node, "1", ())

    def pause(self) -> Pause:
        return next(iter(self._read(Pause, "1", ())), Pause())

    def tasks(self, where: str = OPEN_TASKS, values: Sequence[Any] = ()) -> list[Task]:
        """With their sessions, attempts and the delivery to their callback_url."""
        tasks = {task.task_id: task for task in self._read(Task, where, values)}
        of_tasks = f"task_id IN (SELECT task_id FROM tasks WHERE {where})"
        sessions = {row.session_id: row for row in self._read(Session, of_tasks, values)}
        of_sessions = f"session_id IN (SELECT session_id FROM sessions WHERE {of_tasks})"
        for attempt in sorted(self._read(Attempt, of_sessions, values), key=lambda row: row.number):
            sessions[attempt.session_id].attempts.append(attempt)
        for session in sorted(sessions.values(), key=lambda row: row.index):
            tasks[session.task_id].sessions.append(session)
        for delivery in self._read(Delivery, of_tasks, values):
            if delivery.url == tasks[delivery.task_id].callback_url:
                tasks[delivery.task_id].delivery = delivery
        return list(tasks.values())

    def _read(self, kind: type[S], where: str, values: Sequence[Any]) -> list[S]:
        names = self._columns[kind]
        rows = self.select(f"SELECT * FROM {_TABLES[kind]} WHERE {where}", values)
        return [msgspec.convert(_document(names, row), kind, strict=False) for row in rows]

    def close(self) -> None:
        self._db.close()


def _saving(kind: type[msgspec.Struct], values: Sequence[Any]) -> str:
    if kind is ForgottenNode:
        return "DELETE FROM nodes WHERE node_id = ?"
    return f"INSERT OR REPLACE INTO {_TABLES[kind]} VALUES ({','.join('?' * len(values))})"


def _document(names: list[str], row: Sequence[Any]) -> dict[str, Any]:
    return {name: json.loads(value) if name in _JSON_COLUMNS else value for name, value in zip(names, row, strict=True)}
