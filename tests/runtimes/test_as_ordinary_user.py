"""The tests of bubblewrap once more without root, which hides what an ordinary user may not do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

NOBODY = 65534
HERE = Path(__file__).parent


def as_nobody(*command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    drop = ["setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", *command]
    env = {"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"} | environment
    return subprocess.run(drop, env=env, cwd="/", capture_output=True, text=True, timeout=280, check=False)


IMPORTS = (
    "import subprocess as s, sys, pytest, hypothesis, pydantic_core, polar; s.run([sys.executable, '-V'], check=True)"
)


def interpreter(path: str) -> str | None:
    """A Python of this version that nobody may run, and that finds our packages."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    candidates = (sys.executable, f"/usr/bin/{version}", f"/usr/local/bin/{version}")
    return next((each for each in candidates if as_nobody(each, "-c", IMPORTS, PYTHONPATH=path).returncode == 0), None)


@pytest.mark.slow
def test_the_same_tests_pass_without_root():
    if os.getuid() != 0:
        pytest.skip("these tests run without root already")
    if shutil.which("setpriv") is None:
        pytest.skip("setpriv is missing: it is in util-linux")
    path = ":".join(part for part in sys.path if part)
    python = interpreter(path)
    if python is None:
        pytest.skip(f"user {NOBODY} may not read this Python or this checkout, so it cannot run the tests")
    with tempfile.TemporaryDirectory() as folder:
        os.chown(folder, NOBODY, NOBODY)
        options = [
            "-q",
            "-x",
            "-k",
            "not local and not messages",
            "-p",
            "no:cacheprovider",
            f"--basetemp={folder}/t",
            f"--ignore={__file__}",
            str(HERE),
        ]
        done = as_nobody(python, "-m", "pytest", *options, PYTHONPATH=path, TMPDIR=folder, HOME=folder)
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "failed" not in done.stdout
