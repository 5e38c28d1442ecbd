"""The bridge on the real Slime: SLIME_DIR names a checkout (or several, with colons between); no GPU, no Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CHECKOUTS = [Path(name) for name in os.environ.get("SLIME_DIR", "").split(":") if name]
WHY_NOT = "SLIME_DIR names no Slime checkout: git clone it, install torch, ray and transformers, and set SLIME_DIR"


def run_on(checkout: Path, *targets: str) -> None:
    path = [TESTS / "peers" / "slime_standins", checkout, TESTS.parent / "src"]
    environment = os.environ | {"PYTHONPATH": ":".join(map(str, path)), "POLAR_INSIDE_SLIME": str(checkout)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *targets]
    finished = subprocess.run(command, cwd=TESTS.parent, env=environment, capture_output=True, text=True, timeout=280)
    assert finished.returncode == 0, finished.stdout[-6000:] + finished.stderr[-2000:]


@pytest.mark.skipif(not CHECKOUTS, reason=WHY_NOT)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_conversion_split_and_hooks(checkout: Path):
    run_on(checkout, str(TESTS / "slime" / "inside"))


@pytest.mark.skipif(not CHECKOUTS, reason=WHY_NOT)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
def test_the_bridges_own_tests_on_slimes_types(checkout: Path):
    run_on(checkout, str(TESTS / "bridge"), str(TESTS / "cases" / "test_case_059_long_trajectories_weigh_once.py"))
