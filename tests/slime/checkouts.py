"""The Slime checkouts that SLIME_DIR names (several with colons between), and processes that run on one of them.

A process gets Slime, the stand-ins and the bridge on its path; whatever it started is gone when its run is over.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
ROOT = TESTS.parent
CHECKOUTS = [Path(name) for name in os.environ.get("SLIME_DIR", "").split(":") if name]
WHY_NOT = "SLIME_DIR names no Slime checkout: see tests/slime/README.md"
MARK = "POLAR_TEST_RUN"

needs_slime = pytest.mark.skipif(not CHECKOUTS, reason=WHY_NOT)
on_every_checkout = pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)


def environment(checkout: Path, **more: str) -> dict[str, str]:
    path = [TESTS / "peers" / "slime_standins", checkout, ROOT / "src", ROOT]
    quiet = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    quiet |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_raylet_start_wait_time_s": "300"}
    here = {"PYTHONPATH": ":".join(map(str, path)), "POLAR_INSIDE_SLIME": str(checkout)}
    return os.environ | quiet | here | more


def run_on(checkout: Path, *arguments: str, seconds: float = 280.0, cwd: Path = ROOT, **more: str) -> str:
    """Runs Python with `arguments`; its output. Fails where it fails, or where it leaves a process behind."""
    mark = secrets.token_hex(8)
    process = subprocess.Popen(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment(checkout, **more) | {MARK: mark},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    finally:
        left = end_marked(mark)
    assert process.returncode == 0, output[-8000:]
    assert left == [], f"left behind: {left}"
    return output


def end_marked(mark: str, seconds: float = 60.0) -> list[str]:
    """Waits for the processes that were started with this mark in their environment, then kills them; the command lines
    of those that had to be killed."""
    deadline = time.monotonic() + seconds
    while (found := _marked(mark)) and time.monotonic() < deadline:
        time.sleep(0.2)
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return list(found.values())


def _marked(mark: str) -> dict[int, str]:
    wanted, found = f"{MARK}={mark}".encode(), {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if wanted in (folder / "environ").read_bytes().split(b"\0"):
                found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()[:200]
    return {pid: command for pid, command in found.items() if command}
