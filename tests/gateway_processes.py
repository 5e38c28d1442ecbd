"""Looking for what should be gone."""

from __future__ import annotations

import os
from pathlib import Path

from sandboxing import cgroups_below


def processes_with(mark: str) -> list[str]:
    """Command lines of live processes that have `mark` in them."""
    return [line for line in _command_lines().values() if mark in line]


def left_behind(gateway_data: Path, gateway_pids: list[int]) -> list[str]:
    """What sandboxes of the gateway with this folder, which has had these pids, have left on the machine."""
    root = gateway_data.resolve() / "sandboxes"
    launchers = {f" {pid} " for pid in gateway_pids}
    lines = _command_lines()
    ours = (line for line in lines.values() if "polar.runtimes.inside" in line)
    found = [line for line in ours if any(pid in line for pid in launchers)]
    found += [line for line in lines.values() if str(root) in line]
    found += [f"mount in process {pid}" for pid in lines if str(root) in _read(f"/proc/{pid}/mountinfo")]
    found += [f"{line}" for line in _read("/proc/self/mounts").splitlines() if str(root) in line]
    found += [str(path) for path in cgroups_below(root)]
    return found + [str(path) for path in root.glob("*")]


def _command_lines() -> dict[int, str]:
    names = (name for name in os.listdir("/proc") if name.isdigit())
    return {int(name): line for name in names if (line := _read(f"/proc/{name}/cmdline").replace("\0", " "))}


def _read(path: str) -> str:
    try:
        return Path(path).read_bytes().decode(errors="replace")
    except OSError:
        return ""
