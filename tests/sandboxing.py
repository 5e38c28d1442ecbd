"""Real sandboxes for tests, and what they may leave behind: nothing."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import itertools
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import pytest

from polar.protocols import ExecResult, Place, Runtime
from polar.requests import ExecInput, RuntimeSpec
from polar.runtimes import Launcher, load_runtime, unavailable

T = TypeVar("T")
_numbers = itertools.count(1)

needs_bubblewrap = pytest.mark.skipif(
    unavailable("bubblewrap") is not None, reason=f"no bubblewrap here: {unavailable('bubblewrap')}"
)
both = pytest.mark.parametrize("kind", [pytest.param("bubblewrap", marks=needs_bubblewrap), "local"])


def place(root: Path) -> Place:
    number = next(_numbers)
    return Place(session_id=f"s{number}", attempt=1, folder=root / f"s{number}-1")


@contextlib.asynccontextmanager
async def standing(
    root: Path, kind: str = "bubblewrap", launcher: Launcher | None = None, **spec: Any
) -> AsyncIterator[Runtime]:
    """A started sandbox. It is stopped at the end, and has then left nothing."""
    runtime = load_runtime(RuntimeSpec(backend=kind, **spec), launcher=launcher)
    where = place(root)
    try:
        await runtime.start(where)
        yield runtime
    finally:
        await runtime.stop()
    assert not where.folder.exists()
    assert cgroups_below(root, where.folder.name) == []


async def sh(
    runtime: Runtime, command: str, *, timeout: float = 30, log: Path | None = None, **step: Any
) -> ExecResult:
    return await runtime.run(ExecInput(command=command, **step), timeout=timeout, log=log)


def cgroups_below(root: Path, name: str = "") -> list[Path]:
    digest = hashlib.sha256(os.fsencode(root.absolute())).hexdigest()[:12]
    return [Path(path) for path, _, _ in os.walk("/sys/fs/cgroup") if f"polar-{digest}-{name}" in path]


def run(story: Coroutine[Any, Any, T], seconds: float = 100) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(story, seconds)

    return asyncio.run(limited())


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def until(holds: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.01)


async def becomes(holds: Callable[[], Coroutine[Any, Any, bool]], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not await holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.02)
