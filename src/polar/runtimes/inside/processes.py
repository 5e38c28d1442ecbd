"""Finding processes in /proc: the descendants of one, and those whose environment carries a mark."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

_ROUNDS = 100


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent, session) of a live process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return fields[0].decode(), int(fields[1]), int(fields[3])


def descendants(root: int) -> set[int]:
    """Living (not zombie) processes below `root`, at any depth."""
    stats = {pid: stat for pid in pids() if (stat := _stat(pid)) is not None}
    found: set[int] = set()
    frontier = {root}
    while frontier:
        frontier = {pid for pid, (_, parent, _) in stats.items() if parent in frontier} - found
        found |= frontier
    return {pid for pid in found if stats[pid][0] != "Z"}


def marked(mark: bytes, among: Iterable[int] | None = None) -> set[int]:
    """Living processes that were started with an environment that has the line `mark`, or one that starts with it
    where it ends with a slash."""
    found = set()
    for pid in pids() if among is None else among:
        try:
            with open(f"/proc/{pid}/environ", "rb") as file:
                lines = file.read().split(b"\0")
        except OSError:
            continue
        if mark in lines or (mark.endswith(b"/") and any(line.startswith(mark) for line in lines)):
            found.add(pid)
    return found


def session_members(session: int) -> set[int]:
    return {pid for pid in pids() if (stat := _stat(pid)) is not None and stat[2] == session and stat[0] != "Z"}


def kill_until_gone(find: Callable[[], set[int]], reap: Callable[[], None]) -> bool:
    """Kills what `find` returns until it returns nothing; False when processes multiply faster than that.

    Stopped first, until no new ones turn up: what is stopped neither forks nor loses its children to another parent.
    """
    stopped: set[int] = set()
    for _ in range(_ROUNDS):
        reap()
        new = find() - stopped
        if not new:
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)
    for _ in range(_ROUNDS):
        reap()
        found = find()
        if not found:
            return True
        _signal(found, signal.SIGKILL)
        time.sleep(0.002)
    return False


def _signal(processes: Iterable[int], number: int) -> None:
    for pid in processes:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)
