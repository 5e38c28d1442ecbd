"""The host's side of a sandbox: work in threads that is waited for, a full disk by its name, what Linux passes on."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from polar.errors import TaskFault, from_os_error

MOST_ARGUMENT = 128 << 10
"""bytes of one argument or variable on Linux"""
T = TypeVar("T")


async def to_its_end(work: Callable[..., T], *arguments: Any) -> T:
    """In a thread, off the loop. Cancelling waits for it, so that nothing is made behind the back of `stop`."""
    done = asyncio.get_running_loop().run_in_executor(None, work, *arguments)
    try:
        return await asyncio.shield(done)
    except asyncio.CancelledError:
        await asyncio.wait([done])
        raise


@contextmanager
def disk() -> Iterator[None]:
    """A full disk is nobody's fault but ours."""
    try:
        yield
    except OSError as error:
        fault = from_os_error(error, "the sandbox's files")
        if fault.name == "disk_full":
            raise fault from error
        raise


@contextmanager
def opened(log: Path | None) -> Iterator[list[int]]:
    if log is None:
        yield []
        return
    fd = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    try:
        yield [fd]
    finally:
        os.close(fd)


def check_sizes(command: str, env: dict[str, str]) -> None:
    longest = {"the command": command} | {f"the variable {name}": f"{name}={value}" for name, value in env.items()}
    for what, text in longest.items():
        if len(text.encode()) >= MOST_ARGUMENT:
            raise TaskFault(f"{what} is longer than 128 KiB, which Linux does not pass on: put it into a file")
