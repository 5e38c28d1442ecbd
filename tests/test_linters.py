"""What `make lint` asks holds: style, types, and which package may import which."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKE = (ROOT / "Makefile").read_text()
LINTERS = [line.split("$(BIN)/")[1] for line in MAKE.split("\nlint:")[1].split("\n\n")[0].splitlines()[1:]]


@pytest.mark.parametrize("linter", LINTERS)
def test_nothing_to_say(linter: str) -> None:
    command = f"{sysconfig.get_path('scripts')}/{linter}".split()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
