"""A sandbox's folder on the host: made private, removed whatever is in it, and swept after its owner's death."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

from polar.runtimes import cgroups
from polar.runtimes.inside.processes import kill_until_gone, marked

SESSION_FOLDERS = ("logs/agent", "artifacts")
MARK = "POLAR_SANDBOX"
"""in the environment of every process that runs without a pid namespace; its value is the sandbox's folder"""
_REMOVE = 'chmod -R u+rwX -- "$1"; rm -rf -- "$1"'
_SERVER_FILE = "server.pid"
_DIE_SECONDS = 5.0


def make(folder: Path, *names: str) -> None:
    """`folder` with session/ and the folders `names`; only this user may look into it."""
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    for name in (*(f"session/{part}" for part in SESSION_FOLDERS), *names):
        (folder / name).mkdir(parents=True, exist_ok=True)


def note_server(folder: Path, pid: int) -> None:
    (folder / _SERVER_FILE).write_text(f"{pid} {_started(pid)}")


def _started(pid: int) -> str | None:
    """When `pid` started (in ticks since boot): with it a pid names one process for ever. None once it has ended,
    also where nobody has taken notice of that."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else fields[19]


def remove(folder: Path) -> None:
    """Also what the sandboxed programs made unreadable, or nested deeper than our call stack."""
    try:
        shutil.rmtree(folder)
    except FileNotFoundError:
        return
    except (OSError, RecursionError):
        subprocess.run(["/bin/sh", "-c", _REMOVE, "sh", folder], check=True, env={})


def kill_marked(folder: Path) -> None:
    kill_until_gone(lambda: marked(f"{MARK}={folder}".encode()), lambda: None)


def sweep(root: Path) -> list[str]:
    """Everything that sandboxes below `root` left behind: processes, cgroups, folders. Their owner must be dead.
    Returns what would not go, which the next sweep finds again."""
    root = root.absolute()
    kill_until_gone(lambda: marked(f"{MARK}={root}/".encode()), lambda: None)
    folders = [entry for entry in root.iterdir() if entry.is_dir()] if root.is_dir() else []
    left = [problem for folder in folders if (problem := _end_server(folder))] + cgroups.sweep(root)
    for folder in folders:
        try:
            remove(folder)
        except (OSError, subprocess.CalledProcessError) as error:
            left.append(f"{folder}: {error}")
    return left


def _end_server(folder: Path) -> str | None:
    """Why it could not be ended."""
    deadline = time.monotonic() + _DIE_SECONDS
    with suppress(FileNotFoundError, ValueError, ProcessLookupError):
        pid, started = (folder / _SERVER_FILE).read_text().split()
        while _started(int(pid)) == started:
            os.kill(int(pid), signal.SIGKILL)
            if time.monotonic() > deadline:
                return f"process {pid} of {folder.name} does not die"
            time.sleep(0.005)
    return None
