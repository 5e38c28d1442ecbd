"""A data folder with a past: tasks that are over, with their files, as a server would have left them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.server.conftest import task

from polar.codec import to_msgpack
from polar.records import SessionResult, SessionStatus, TaskState, Termination
from polar.requests import TaskRequest
from polar.server import submission
from polar.server.files import Files
from polar.server.state import Attempt, AttemptState, Session
from polar.server.tables import Tables

SESSIONS = 2


def fill(folder: Path, tasks: int) -> None:
    """`task-0` ended first."""
    files, tables = Files(folder), Tables(str(folder / "polar.db"))
    rows: list[Any] = []
    for number in range(tasks):
        request = TaskRequest.model_validate(task(f"task-{number}", num_samples=SESSIONS))
        over = submission.new_task(request, 0.0, float(number))
        over.status, over.completed_sessions, over.ended_at = TaskState.COMPLETED, SESSIONS, float(number)
        rows += [over, *over.sessions, *(_won(session, files) for session in over.sessions)]
    tables.commit([(type(row), tables.values(row)) for row in rows], float(tasks))
    tables.close()


def _won(session: Session, files: Files) -> Attempt:
    session.status, session.termination, session.winner = SessionStatus.COMPLETED, Termination.DONE, 1
    attempt = Attempt(session_id=session.session_id, number=1, node_id="node-a", epoch=1, leased_at=0.0, expires_at=1.0)
    attempt.state = AttemptState.WON
    result = SessionResult(session_id=session.session_id, task_id=session.task_id, status=session.status)
    path = files.result_path(session.task_id, session.session_id, 1)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(to_msgpack(result))
    files.log_path(session.session_id, 1).write_bytes(b"log")
    attempt.bytes = files.size(session.task_id, session.session_id, 1)
    return attempt


def files_of(folder: Path) -> set[str]:
    """Sessions and attempts that have a file here, as `session.attempt`."""
    results = (path.name.removesuffix(".result") for path in folder.glob("tasks/*/*"))
    logs = (path.name.removesuffix(".zst") for path in folder.glob("logs/*"))
    return {*results, *logs}
