"""Results and sealed logs as files, each whole or not there: written beside, synced, renamed; only then the row.

`<data>/tasks/<task>/<session>.<attempt>.result` is a SessionResult in msgpack, `<data>/logs/<session>.<attempt>.zst`
a packed session log, `….part` a log that is still arriving; `<data>/unfinished` has results that are being written.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

import msgspec

from polar.codec import from_msgpack, to_msgpack
from polar.records import SessionResult
from polar.server.state import Session, Task

RESERVE_BYTES = 64 << 20
"""below this no new task is taken, so that running ones can finish"""
_LONGEST_NAME = 200


def _place(folder: Path) -> tuple[int, int]:
    found = folder.stat()
    return found.st_dev, found.st_ino


class Files:
    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        self._logs, self._unfinished = self.folder / "logs", self.folder / "unfinished"
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._logs.mkdir(exist_ok=True)
        self._place = _place(self.folder)

    def begin(self) -> None:
        """Forgets what an earlier life did not finish writing. The folder must be of no other server."""
        shutil.rmtree(self._unfinished, ignore_errors=True)
        self._unfinished.mkdir(exist_ok=True)

    def free_bytes(self) -> int:
        """Raises OSError where the folder is no longer there, or another has taken its place: what is open of the old
        one is written to nowhere."""
        if _place(self.folder) != self._place:
            raise FileNotFoundError(errno.ENOENT, "another folder has taken its place", str(self.folder))
        return shutil.disk_usage(self.folder).free

    def full(self) -> bool:
        return self.free_bytes() < RESERVE_BYTES

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
        partial = self._unfinished / f"{path.name}.{secrets.token_hex(4)}"
        try:
            partial.write_bytes(to_msgpack(result))
            _settle(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def paths(self, task: Task) -> list[str]:
        won = [session for session in task.sessions if session.winner is not None]
        return [str(self.result_path(task.task_id, row.session_id, row.winner or 0)) for row in won]

    def result(self, session: Session, task: Task) -> SessionResult:
        """Of a session that has ended."""
        if session.winner is None:
            return _ended_by_server(session, task)
        path = self.result_path(session.task_id, session.session_id, session.winner)
        try:
            return from_msgpack(path.read_bytes(), SessionResult)
        except (FileNotFoundError, msgspec.MsgspecError) as error:
            lost = _ended_by_server(session, task)
            lost.error = f"the result's file cannot be read: {error}"
            return lost

    def log_size(self, session_id: str, attempt: int) -> int:
        return _size(self.log_path(session_id, attempt)) or _size(self._partial(session_id, attempt))

    def open_log(self, session_id: str, attempt: int) -> int:
        """A descriptor for writing the arriving log; bytes that are sent twice fall on themselves."""
        return os.open(self._partial(session_id, attempt), os.O_WRONLY | os.O_CREAT, 0o644)

    def seal_log(self, session_id: str, attempt: int, sha256: str) -> bool:
        """True once the log with this hash is here for good. Another log is thrown away: it has to be sent anew."""
        path, partial = self.log_path(session_id, attempt), self._partial(session_id, attempt)
        for candidate in (path, partial, path):  # the same result, sent twice at once, may seal it between two looks
            if _sha256(candidate) == sha256:
                if candidate is partial:
                    with suppress(FileNotFoundError):
                        _settle(partial, path)
                return True
        path.unlink(missing_ok=True)
        partial.unlink(missing_ok=True)
        return False

    def size(self, task_id: str, session_id: str, attempt: int) -> int:
        """Bytes of the attempt's result and log."""
        return self.log_size(session_id, attempt) + _size(self.result_path(task_id, session_id, attempt))

    def discard(self, task_id: str, session_id: str, attempts: int) -> None:
        """Removes every file of the session."""
        for number in range(1, attempts + 1):
            self.log_path(session_id, number).unlink(missing_ok=True)
            self._partial(session_id, number).unlink(missing_ok=True)
        folder = self.result_path(task_id, session_id, 1).parent
        for path in folder.glob(f"{glob.escape(session_id)}.*"):
            path.unlink(missing_ok=True)
        with suppress(OSError):  # another session's results are there, or nothing ever was
            folder.rmdir()

    def _partial(self, session_id: str, attempt: int) -> Path:
        return self._logs / f"{session_id}.{attempt}.zst.part"


def _size(path: Path) -> int:
    """0 where there is no such file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _sha256(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


def _settle(partial: Path, path: Path) -> None:
    """When this returns, the file is on disk under its name."""
    _sync(partial)
    partial.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _ended_by_server(session: Session, task: Task) -> SessionResult:
    facts = {
        "session_index": session.index,
        "group_size": task.num_samples,
        "termination": session.termination,
        "fault": session.fault,
    }
    return SessionResult(
        session_id=session.session_id,
        task_id=session.task_id,
        status=session.status,
        timing=session.timing,
        node_id=session.node_id,
        error=session.error,
        metadata={key: value for key, value in facts.items() if value is not None},
    )
