"""An older server's database is taken over whole, or not at all; a newer one's is refused by name."""

from __future__ import annotations

import json
import sqlite3
import subprocess
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.server.conftest import Server, eventually, task

from polar.codec import to_msgpack
from polar.nodeapi import Held, Lease
from polar.records import SessionResult, SessionStatus
from polar.server.tables import MIGRATIONS

SCHEMA_1 = """
    CREATE TABLE migrations (version INTEGER PRIMARY KEY);
    INSERT INTO migrations VALUES (1);
    CREATE TABLE clock (uptime REAL NOT NULL);
    INSERT INTO clock VALUES (500.0);
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
    """
TASK = """
    INSERT INTO tasks VALUES (?, 'digest', ?, ?, 0, 2, NULL, NULL, 'bubblewrap', 'shell', '', 0, NULL, 'json', 1,
        ?, 0, 1.0, 1.0, 1.0, 1700000000.0, 1700000001.0, NULL, NULL)"""
OVER = """
    INSERT INTO sessions VALUES ('old-s0', 'old', 0, 'COMPLETED', 10.0, 'done', NULL, NULL, 1, 'node-a', 1.0, 1, 1, 1,
        NULL, '{"run_ms": 12.0}');
    INSERT INTO attempts VALUES ('old-s0', 1, 'node-a', 3, 11.0, 60.0, 'won', 3, NULL, 'sha');
    """
RUNNING = """
    INSERT INTO sessions VALUES ('open-s0', 'open', 0, 'RUNNING', 400.0, NULL, NULL, NULL, NULL, 'node-a', NULL, NULL,
        NULL, 0, NULL, '{}');
    INSERT INTO attempts VALUES ('open-s0', 1, 'node-a', 3, 480.0, 510.0, 'leased', 0, NULL, NULL);
    INSERT INTO nodes VALUES ('node-a', 3, '', '{"init": 4, "run": 2, "postrun": 4}',
        '{"kind": "scripted", "healthy": true}', '["bubblewrap"]', '["shell"]', 5.0, 0, 1700000000.0);
    """


def old_folder(folder: Path) -> None:
    """As the first release left it: one task over, one under way on node-a (epoch 3)."""
    (folder / "tasks" / "old").mkdir(parents=True)
    (folder / "logs").mkdir()
    with closing(sqlite3.connect(folder / "polar.db")) as rows:
        rows.execute("PRAGMA journal_mode = WAL")
        rows.executescript(SCHEMA_1)
        rows.execute(TASK, ("old", json.dumps(task("old")), "completed", 1))
        rows.execute(TASK, ("open", json.dumps(task("open")), "running", 0))
        rows.executescript(OVER + RUNNING)
        rows.commit()
    result = SessionResult(session_id="old-s0", task_id="old", status=SessionStatus.COMPLETED)
    (folder / "tasks" / "old" / "old-s0.1.result").write_bytes(to_msgpack(result))
    (folder / "logs" / "old-s0.1.zst").write_bytes(b"an old log")


def lease_of(session_id: str) -> Lease:
    return Lease(
        session_id=session_id, session_index=0, attempt=1, key="", lease_seconds=30.0, queued_seconds=0.0, task={}
    )


def test_first_schema_is_taken_over_and_goes_on(tmp_path: Path) -> None:
    old_folder(tmp_path)
    server = Server(tmp_path)
    try:
        assert server.task("old")["results"][0]["session_id"] == "old-s0"
        assert server.http.get("/tasks/old/sessions/old-s0/log").content == b"an old log"
        node = server.node(epoch=3)
        node.held = [Held(session_id="open-s0", attempt=1, stage=SessionStatus.RUNNING)]
        assert node.poll().cancels == []
        assert node.finish(lease_of("open-s0")).accepted
        assert server.task("open")["status"] == "completed"
        held = sum(path.stat().st_size for name in ("tasks", "logs") for path in tmp_path.glob(f"{name}/**/*.*"))
        eventually(lambda: _bytes(tmp_path) == held)
    finally:
        server.kill()


def _bytes(folder: Path) -> int:
    """What the server knows of its files' sizes, also of those that the first release did not measure."""
    with closing(sqlite3.connect(folder / "polar.db", timeout=30)) as rows:
        assert rows.execute("SELECT count(*) FROM attempts").fetchone() == (2,)
        return int(rows.execute("SELECT sum(bytes) FROM attempts").fetchone()[0] or 0)


def test_old_tasks_are_retired_like_others(tmp_path: Path) -> None:
    old_folder(tmp_path)
    server = Server(tmp_path, retain_days=1 / 86_400, delivery_seconds=1.0)
    try:
        eventually(lambda: server.http.get("/rollout/task/old").status_code == 404)
        eventually(lambda: not list(tmp_path.glob("tasks/*")) and not list(tmp_path.glob("logs/*")))
        assert server.task("open", results="false")["status"] == "running"
    finally:
        server.kill()


def test_kill_in_the_middle_of_a_migration_leaves_a_whole_schema(tmp_path: Path) -> None:
    """Enough rows that a new index outgrows SQLite's cache: its pages reach the disk before the transaction ends."""
    old_folder(tmp_path)
    with closing(sqlite3.connect(tmp_path / "polar.db")) as rows:
        numbers = ((f"lost-s{number}",) for number in range(400_000))
        rows.executemany("INSERT INTO attempts VALUES (?, 1, 'n', 1, 1.0, 1.0, 'won', 0, NULL, NULL)", numbers)
        rows.commit()
    server = Server.__new__(Server)
    server.folder, server.settings = tmp_path, {"port": 0, "save_dir": str(tmp_path)}
    process = subprocess.Popen(server.command(), stdout=subprocess.PIPE)
    wal = tmp_path / "polar.db-wal"
    eventually(lambda: wal.exists() and wal.stat().st_size > 200_000, seconds=60)
    process.kill()
    process.wait()
    with closing(sqlite3.connect(tmp_path / "polar.db")) as rows:
        (version,) = rows.execute("SELECT max(version) FROM migrations").fetchone()
        assert version < len(MIGRATIONS)
        assert schema(rows) == schema_of(version)
        assert rows.execute("SELECT count(*) FROM attempts").fetchone() == (400_002,)
        assert rows.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    server.start()
    try:
        assert server.task("old")["status"] == "completed"
    finally:
        server.kill()


def schema_of(version: int) -> list[str]:
    with closing(sqlite3.connect(":memory:")) as rows:
        rows.executescript(";".join(["CREATE TABLE migrations (version INTEGER PRIMARY KEY)", *MIGRATIONS[:version]]))
        return schema(rows)


def schema(rows: sqlite3.Connection) -> list[str]:
    return [
        " ".join(sql.split()) for (sql,) in rows.execute("SELECT sql FROM sqlite_master WHERE sql NOTNULL ORDER BY 1")
    ]


def test_newer_schema_is_refused_by_name(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.stop()
    newer = len(MIGRATIONS) + 1
    with closing(sqlite3.connect(server.folder / "polar.db")) as rows:
        rows.execute("INSERT INTO migrations VALUES (?)", (newer,))
        rows.commit()
    ended = subprocess.run(server.command(), capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert f"written by a newer Polar (schema {newer}, known {len(MIGRATIONS)})" in ended.stderr
    assert str(server.folder / "polar.db") in ended.stderr
