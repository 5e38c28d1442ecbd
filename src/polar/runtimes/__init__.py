"""Runtimes by name. bubblewrap unless another is asked for; `local`, which protects nothing, only when asked for."""

from __future__ import annotations

import asyncio
from pathlib import Path

import structlog

from polar.plugins import load
from polar.protocols import Runtime
from polar.requests import RuntimeSpec
from polar.runtimes import folders
from polar.runtimes.availability import unavailable
from polar.runtimes.launcher import Launcher
from polar.runtimes.preparing import prepare
from polar.runtimes.served import Served

__all__ = ["RUNTIMES", "Launcher", "load_runtime", "prepare", "sweep", "unavailable"]

log = structlog.get_logger("polar.runtimes")
RUNTIMES = {"bubblewrap": "polar.runtimes.bubblewrap:Bubblewrap", "local": "polar.runtimes.local:Local"}


def load_runtime(spec: RuntimeSpec, default: str | None = None, launcher: Launcher | None = None) -> Runtime:
    """`launcher` is shared by all sandboxes of a gateway and outlives them. Raises TaskFault."""
    name = spec.backend or default or "bubblewrap"
    runtime: Runtime = load("runtime", RUNTIMES, name, spec.import_path)(spec)
    if isinstance(runtime, Served):
        runtime.launcher = launcher
    return runtime


async def sweep(root: Path) -> None:
    """Removes what the sandboxes of a dead owner left below `root`: processes, cgroups, folders. What would not go is
    named in the log."""
    for problem in await asyncio.to_thread(folders.sweep, root):
        log.error("not swept away", what=problem)
