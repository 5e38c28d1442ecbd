"""What is over is retired, the oldest first, by age and by size; what is owed, runs, or ended just now stays."""

from __future__ import annotations

import os
import random
import sqlite3
import subprocess
import sys
from collections.abc import Callable
from contextlib import closing
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.peers.receiver import callback_url, nobody
from tests.server.conftest import TOKEN, Server, eventually
from tests.server.past import SESSIONS, files_of, fill

from polar.config import TOKEN_VARIABLE

SECOND = 1 / 86_400
"""in days"""
TASKS = 240
MakeServer = Callable[..., Server]


def storage(server: Server) -> dict[str, Any]:
    answer: dict[str, Any] = server.http.get("/rollout/status").json()["storage"]
    return answer


def run_one(server: Server, task_id: str, **changes: Any) -> str:
    """Its session's id, once its result has been accepted."""
    assert server.submit(task_id).status_code == 200
    node = server.node()
    (lease,) = node.lease()
    assert node.finish(lease, **changes).accepted
    return lease.session_id


def on_disk(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_oldest_go_first_until_the_rest_fits(make_server: MakeServer) -> None:
    server = make_server(retain_gb=0.003, delivery_seconds=1.0)
    for number in range(12):
        run_one(server, f"task-{number}", harness_log=os.urandom(200_000).hex())
    kept = eventually(lambda: (now := storage(server))["used_bytes"] <= now["limit_bytes"] == 3_000_000 and now)
    assert 3 <= kept["tasks"] <= 7
    assert kept["tasks"] + kept["retired_tasks"] == 12
    assert list(server.http.get("/rollout/status").json()["tasks"]) == [
        f"task-{number}" for number in range(12 - kept["tasks"], 12)
    ]
    eventually(lambda: len(list(server.folder.glob("tasks/*"))) == kept["tasks"])
    assert len(server.task("task-11")["results"][0]["metadata"]["harness_log"]) == 400_000
    held = sum(path.stat().st_size for name in ("tasks", "logs") for path in server.folder.glob(f"{name}/**/*.*"))
    assert 0 < kept["used_bytes"] - held < 300_000, "files, and the database's pages in use"


def test_what_is_too_old_goes_and_what_runs_stays(make_server: MakeServer) -> None:
    server = make_server(retain_days=3 * SECOND, delivery_seconds=1.0)
    session = run_one(server, "over")
    server.submit("running")
    node = server.node()
    (lease,) = node.lease()
    assert server.task("over")["status"] == "completed"
    eventually(lambda: server.http.get("/rollout/task/over").status_code == 404)
    assert server.http.get("/tasks/over/sessions").status_code == 404
    assert server.http.get(f"/tasks/over/sessions/{session}/log").status_code == 404
    assert [row["task_id"] for row in server.http.get("/tasks").json()["tasks"]] == ["running"]
    eventually(lambda: files_of(server.folder) == set())
    assert node.finish(lease).accepted
    assert server.task("running")["status"] == "completed"


def test_retired_task_answers_as_one_that_never_was(make_server: MakeServer) -> None:
    server = make_server(retain_days=SECOND, delivery_seconds=1.0, lease_seconds=1.0)
    server.submit("again")
    lost, second = server.node("first").lease()[0], server.node("second")
    second.finish(second.lease()[0])
    eventually(lambda: storage(server)["retired_tasks"] == 1)
    with pytest.raises(httpx.HTTPStatusError, match="404"):
        server.node("first").finish(lost)
    eventually(lambda: files_of(server.folder) == set())
    assert server.submit("again", num_samples=3).status_code == 200, "the id is free"
    assert server.task("again")["total_sessions"] == 3


@pytest.mark.slow
def test_owed_callback_keeps_its_task(make_server: MakeServer) -> None:
    """Its receiver is down, and the trainer names another again and again: each is owed anew."""
    server = make_server(retain_days=SECOND, delivery_seconds=6.0)
    run_one(server, "redirected")
    run_one(server, "over")
    turns = count()
    with nobody() as port:

        def younger_one_has_gone() -> bool:
            again = server.submit("redirected", callback_url=f"{callback_url(port)}&turn={next(turns)}")
            assert again.json()["status"] == "completed"
            return server.http.get("/rollout/task/over").status_code == 404

        eventually(younger_one_has_gone)
        assert server.task("redirected")["completed_sessions"] == 1
        eventually(lambda: server.http.get("/rollout/task/redirected").status_code == 404)


def test_too_much_that_may_not_go_yet_refuses_new_tasks(make_server: MakeServer) -> None:
    server = make_server(retain_gb=0.001, delivery_seconds=8.0)
    server.submit("running")
    running = server.node("other")
    (lease,) = running.lease()
    run_one(server, "large", harness_log="x" * 1_500_000)
    turns = count()

    def submit_another() -> httpx.Response:
        return server.submit(f"new-{next(turns)}")

    refused = eventually(lambda: (answer := submit_another()).status_code == 507 and answer)
    assert "rollout.retain_gb = 0.001" in refused.json()["detail"]
    assert str(server.folder) in refused.json()["detail"]
    assert storage(server)["full"] is True
    assert running.finish(lease).accepted
    eventually(lambda: submit_another().status_code == 200, seconds=40)
    assert server.http.get("/rollout/task/large").status_code == 404
    assert storage(server)["full"] is False


@pytest.mark.slow
def test_kill_while_retiring_leaves_no_half_task_and_no_file(make_server: MakeServer) -> None:
    server = make_server()
    server.stop()
    for path in server.folder.glob("polar.db*"):
        path.unlink()
    fill(server.folder, TASKS)
    server.settings |= {"retain_days": SECOND, "delivery_seconds": 1.0}
    progress = random.Random(7)
    seen: list[int] = []
    while not seen or seen[-1] > 0:
        server.start()
        goal = (seen[-1] if seen else TASKS) - progress.randrange(1, TASKS // 3)
        eventually(lambda goal=goal: _tasks(server.folder) <= max(goal, 0), seconds=60)
        server.kill()
        seen.append(_whole_tasks(server.folder))
    assert len(seen) > 3, "it was killed in the middle"
    server.start()
    eventually(lambda: files_of(server.folder) == set())
    eventually(lambda: not list(server.folder.glob("tasks/*")))
    assert (storage(server)["tasks"], storage(server)["retired_tasks"]) == (0, TASKS)


def _tasks(folder: Path) -> int:
    with closing(sqlite3.connect(folder / "polar.db", timeout=30)) as rows:
        return int(rows.execute("SELECT count(*) FROM tasks").fetchone()[0])


def _whole_tasks(folder: Path) -> int:
    """How many there are. Each has its rows and files, and each other file a note that it is to go."""
    with closing(sqlite3.connect(folder / "polar.db")) as rows:
        tasks = {name for (name,) in rows.execute("SELECT task_id FROM tasks")}
        sessions = rows.execute("SELECT task_id, session_id FROM sessions").fetchall()
        attempts = {name for (name,) in rows.execute("SELECT session_id FROM attempts")}
        noted = {name for (name,) in rows.execute("SELECT session_id FROM discarded")}
    assert {task_id for task_id, _ in sessions} == tasks
    assert len(sessions) == SESSIONS * len(tasks)
    assert {session_id for _, session_id in sessions} == attempts
    for task_id, session_id in sessions:
        assert (folder / "tasks" / task_id / f"{session_id}.1.result").is_file()
        assert (folder / "logs" / f"{session_id}.1.zst").is_file()
    assert {name.rsplit(".", 1)[0] for name in files_of(folder)} <= attempts | noted
    return len(tasks)


def test_database_takes_its_own_room_again(make_server: MakeServer) -> None:
    server = make_server(retain_days=SECOND, delivery_seconds=1.0)
    sizes = []
    for wave in range(3):
        for number in range(20):
            server.submit(f"task-{wave}-{number}", instruction="x" * 200_000)
            assert server.http.delete(f"/rollout/task/task-{wave}-{number}").json()["status"] == "cancelled"
        eventually(lambda: storage(server)["tasks"] == 0, seconds=40)
        sizes.append(on_disk(server.folder))
    assert sizes[0] > 20 * 200_000
    assert max(sizes) < 1.5 * sizes[0]
    assert storage(server)["used_bytes"] < 300_000


def test_status_says_what_is_kept(make_server: MakeServer) -> None:
    server = make_server(retain_gb=2.0)
    run_one(server, "kept")
    (line,) = [line for line in polar_status("--server", server.url) if line.startswith("data: ")]
    assert " of 2.0 GB used" in line
    assert "tasks: 1 kept, 0 retired" in line


def test_looking_at_a_folder_retires_nothing(tmp_path: Path) -> None:
    """Whoever looks does not know the bounds that the folder's own server has."""
    fill(tmp_path, 3)
    with closing(sqlite3.connect(tmp_path / "polar.db")) as rows:
        rows.execute("UPDATE clock SET uptime = ?", (365 * 86_400.0,))
        rows.commit()
    assert any("tasks: 3 kept, 0 retired" in line for line in polar_status("--data", str(tmp_path)))
    assert _whole_tasks(tmp_path) == 3


def polar_status(*words: str) -> list[str]:
    command = [sys.executable, "-m", "polar", "status", *words]
    environment = os.environ | {TOKEN_VARIABLE: TOKEN, "COLUMNS": "200"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60).stdout.splitlines()
