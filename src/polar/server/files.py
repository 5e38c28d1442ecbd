"""Results and sealed logs as files, each whole or not there: written beside, synced, renamed; only then the row.

`<data>/tasks/<task>/<session>.<attempt>.result` is a SessionResult in msgpack, `<data>/logs/<session>.<attempt>.zst`
a packed session log, `….part` a log that is still arriving.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from pathlib import Path
from urllib.parse import quote

import msgspec

from polar.codec import from_msgpack, to_msgpack
from polar.records import SessionResult
from polar.server.state import Session, Task

RESERVE_BYTES = 64 << 20
"""below this no new task is taken, so that running ones can finish"""
_LONGEST_NAME = 200


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._logs = self.folder / "logs"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs.mkdir(exist_ok=True)

    def full(self) -> bool:
        return shutil.disk_usage(self.folder).free < RESERVE_BYTES

    def result_path(self, task_id: str, session_id: str, attempt: int) -> Path:
        name = quote(task_id, safe="")
        if len(name) > _LONGEST_NAME:
            name = f"{name[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return self.folder / "tasks" / name / f"{session_id}.{attempt}.result"

    def log_path(self, session_id: str, attempt: int) -> Path:
        return self._logs / f"{session_id}.{attempt}.zst"

    def write_result(self, result: SessionResult, attempt: int) -> None:
        path = self.result_path(result.task_id, result.session_id, attempt)
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(path.name + ".part")
        with partial.open("wb") as file:
            file.write(to_msgpack(result))
            file.flush()
            os.fsync(file.fileno())
        partial.rename(path)

    def paths(self, task: Task) -> list[str]:
        won = [session for session in task.sessions if session.winner is not None]
        return [str(self.result_path(task.task_id, row.session_id, row.winner or 0)) for row in won]

    def results(self, task: Task) -> list[SessionResult]:
        """Of the sessions that have ended, in the order of their indices."""
        return [self.result(session) for session in task.sessions if session.status.terminal]

    def result(self, session: Session) -> SessionResult:
        """Of a session that has ended."""
        if session.winner is None:
            return _ended_by_server(session)
        path = self.result_path(session.task_id, session.session_id, session.winner)
        try:
            return from_msgpack(path.read_bytes(), SessionResult)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            lost = _ended_by_server(session)
            lost.error = f"the result's file cannot be read: {error}"
            return lost

    def log_size(self, session_id: str, attempt: int) -> int:
        for path in (self.log_path(session_id, attempt), self._partial(session_id, attempt)):
            if path.exists():
                return path.stat().st_size
        return 0

    def open_log(self, session_id: str, attempt: int) -> int:
        """A descriptor for writing the arriving log; bytes that are sent twice fall on themselves."""
        return os.open(self._partial(session_id, attempt), os.O_WRONLY | os.O_CREAT, 0o644)

    def seal_log(self, session_id: str, attempt: int, sha256: str) -> bool:
        """True once the log with this hash is here for good. Another log is thrown away: it has to be sent anew."""
        path, partial = self.log_path(session_id, attempt), self._partial(session_id, attempt)
        for candidate in (path, partial):
            if candidate.exists() and hashlib.sha256(candidate.read_bytes()).hexdigest() == sha256:
                break
            candidate.unlink(missing_ok=True)
        else:
            return False
        if candidate is partial:
            fd = os.open(partial, os.O_RDONLY)
            os.fsync(fd)
            os.close(fd)
            partial.rename(path)
        return True

    def _partial(self, session_id: str, attempt: int) -> Path:
        return self._logs / f"{session_id}.{attempt}.zst.part"


def _ended_by_server(session: Session) -> SessionResult:
    facts = {"session_index": session.index, "termination": session.termination, "fault": session.fault}
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id,
        status=session.status,
        timing=session.timing,
        node_id=session.node_id,
        error=session.error,
        metadata={key: value for key, value in facts.items() if value is not None},
    )
