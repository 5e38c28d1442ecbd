"""Memory, process and CPU limits of a sandbox through the host's cgroups (v1 or v2), where they may be written.

Names start with `polar-` and a digest of the sandboxes' root folder, so that a sweep finds what a dead owner left.
"""

from __future__ import annotations

import errno
import hashlib
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_V1 = ("memory", "pids", "cpu")
_PERIOD = 100_000
_REMOVE_SECONDS = 5.0


class Limits:
    """What a sandbox may use; None = as much as it likes."""

    def __init__(self, memory: int | None, pids: int | None, cpus: float | None) -> None:
        self.memory, self.pids, self.cpus = memory, pids, cpus


class Cgroup:
    """The groups of one sandbox, one a controller (v2: one). Empty where none may be written."""

    def __init__(self, folder: Path, limits: Limits) -> None:
        self._groups: dict[str, Path] = {}
        self._hits = 0
        for controller, base in bases().items():
            self._try(controller, base / name_of(folder), _settings(controller, limits))

    def _try(self, controller: str, group: Path, settings: dict[str, str]) -> None:
        if not settings:
            return
        try:
            group.mkdir(exist_ok=True)
            for file, value in settings.items():
                (group / file).write_text(value)
        except OSError:
            with suppress(OSError):
                group.rmdir()
        else:
            self._groups[controller] = group

    @property
    def controllers(self) -> set[str]:
        """Of memory, pids and cpu, those whose limits hold."""
        return set(_V1) if "v2" in self._groups else set(self._groups)

    def add(self, pid: int) -> None:
        for group in self._groups.values():
            (group / "cgroup.procs").write_text(str(pid))

    def hit(self) -> bool:
        """Whether the kernel killed for memory, or refused a process, since the last call."""
        before, self._hits = self._hits, sum(_counted(group) for group in self._groups.values())
        return self._hits > before

    def remove(self) -> None:
        for group in self._groups.values():
            _remove(group)
        self._groups = {}


def name_of(folder: Path) -> str:
    return f"{_prefix(folder.parent)}{folder.name}"


def _prefix(root: Path) -> str:
    return f"polar-{hashlib.sha256(os.fsencode(root)).hexdigest()[:12]}-"


def bases() -> dict[str, Path]:
    """Where groups are made in each hierarchy that has the controllers: {"v2": …} or a v1 controller each."""
    found: dict[str, Path] = {}
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        for name in {"v2"} if not names else set(names.split(",")) & set(_V1):
            mount = _ROOT if name == "v2" else _ROOT / name
            group = mount / path.lstrip("/")
            found[name] = group if group.is_dir() else mount
    unified = found.pop("v2", None)
    delegated = _delegated(unified) if unified else None
    return found if delegated is None else {"v2": delegated}


def _delegated(group: Path) -> Path | None:
    """In v2 a group with processes has no controllers to hand down, so ours stand beside it, below its parent."""
    for base in (group, group.parent):
        file = base / "cgroup.subtree_control"
        if file.is_file() and {"memory", "pids"} <= set(file.read_text().split()):
            return base
    return None


def _settings(controller: str, limits: Limits) -> dict[str, str]:
    """{file: what to write} of one controller's group."""
    memory, pids = str(limits.memory or ""), str(limits.pids or "")
    quota = "" if limits.cpus is None else str(max(1000, int(limits.cpus * _PERIOD)))
    files = {
        "memory": {"memory.limit_in_bytes": memory},
        "pids": {"pids.max": pids},
        "cpu": {"cpu.cfs_quota_us": quota},
        "v2": {"memory.max": memory, "pids.max": pids, "cpu.max": quota and f"{quota} {_PERIOD}"},
    }
    return {file: value for file, value in files[controller].items() if value}


def _counted(group: Path) -> int:
    """Kills for memory and refused forks so far."""
    total = 0
    for file, key in (("memory.events", "oom_kill"), ("memory.oom_control", "oom_kill"), ("pids.events", "max")):
        with suppress(FileNotFoundError):
            lines = (line.split() for line in (group / file).read_text().splitlines())
            total += sum(int(value) for name, value in lines if name == key)
    return total


def sweep(root: Path) -> list[str]:
    """Removes every group of a sandbox below `root`, killing what is in it. Returns what would not go."""
    left = []
    for base in bases().values():
        for group in base.glob(f"{_prefix(root)}*"):
            with suppress(FileNotFoundError, ProcessLookupError):
                for pid in (group / "cgroup.procs").read_text().split():
                    os.kill(int(pid), signal.SIGKILL)
            try:
                _remove(group)
            except OSError as error:
                left.append(f"{group}: {error}")
    return left


def _remove(group: Path) -> None:
    """A group can be removed a moment after its last process has ended."""
    deadline = time.monotonic() + _REMOVE_SECONDS
    while True:
        try:
            group.rmdir()
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.01)
        else:
            return
