"""Prepare actions: what readies a sandbox before the harness. A failing one is the task's fault, named by its index."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

from polar.errors import TaskFault
from polar.protocols import Runtime
from polar.requests import ExecInput, PrepareAction

_SHOWN = 2000


async def prepare(runtime: Runtime, actions: Sequence[PrepareAction], timeout: float) -> None:
    """Carries out all `actions` in order, within `timeout` seconds altogether. Raises TaskFault `prepare`."""
    deadline = asyncio.get_running_loop().time() + timeout
    for index, action in enumerate(actions):
        left = deadline - asyncio.get_running_loop().time()
        try:
            async with asyncio.timeout(max(0, left)):
                problem = await _act(runtime, action, left)
        except TimeoutError:
            problem = f"not done within the {timeout:g} s of all actions"
        except (OSError, TaskFault) as error:
            problem = str(error)
        if problem:
            raise TaskFault(f"prepare action {index} ({action.type}): {problem}", name="prepare")


async def _act(runtime: Runtime, action: PrepareAction, timeout: float) -> str | None:
    """What went wrong, or None."""
    target = action.target or ""
    if action.content is not None:
        await runtime.write(target, action.content.encode())
    elif action.source is not None:
        source = Path(action.source)
        if source.exists() and source.is_dir() != (action.type == "upload_dir"):
            return f"{source} is {'a folder' if source.is_dir() else 'no folder'} on the gateway's host"
        await runtime.upload(source, target)
    else:
        step = ExecInput(command=action.command or "", cwd=action.cwd, env=action.env)
        result = await runtime.run(step, timeout=timeout)
        if result.timed_out:
            raise TimeoutError
        if result.exit_code:
            return f"exit code {result.exit_code}: {(result.errors or result.output)[-_SHOWN:].strip()}"
    return None
