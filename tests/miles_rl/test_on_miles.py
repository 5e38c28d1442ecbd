"""The bridge on the trainer of Slime's family that a package index has. Its Sample has no grouping id: it can take
sessions of one trace each, and refuses others by name."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
FOLDER = Path(os.environ.get("POLAR_TEST_MILES") or Path(sys.prefix) / "miles")
QUICK = "not any_size and not whatever_happens"
"""the properties hold or fall with the bridge's own code"""
WHY_NOT = f"no miles-rl: make test puts it there, or pip install --no-deps --target {FOLDER} miles-rl==0.0.2"


@pytest.mark.skipif(not (FOLDER / "miles").is_dir(), reason=WHY_NOT)
def test_hooks_nesting_and_data_source() -> None:
    path = [TESTS / "peers" / "miles_standins", FOLDER, TESTS.parent / "src"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "POLAR_INSIDE_MILES": "1"}
    targets = [TESTS / "miles_rl" / "inside", TESTS / "bridge" / "test_bridge_data_source.py"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", QUICK, *map(str, targets)]
    finished = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]
