"""The linters have nothing to say: style, types, and which package may import which. `make lint` runs these alone."""

from __future__ import annotations

import subprocess
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("linter", ["ruff check src tests benchmarks examples", "mypy", "lint-imports --no-cache"])
def test_nothing_to_say(linter: str) -> None:
    command = f"{sysconfig.get_path('scripts')}/{linter}".split()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
