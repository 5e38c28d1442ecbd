"""`polar demo` as its user sees it: a process whose last line is JSON, and whose proofs hold."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


def demo(run_dir: Path, *options: str) -> dict[str, Any]:
    """The JSON of its last line. Exit code 1 would say that a proof did not hold."""
    command = [sys.executable, "-m", "polar", "demo", "--run-dir", str(run_dir), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr + done.stdout
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_two_steps_prove_what_they_say(tmp_path: Path) -> None:
    told = demo(tmp_path / "run", "--steps", "2", "--samples", "4")
    assert told["steps"] == 2
    assert told["sampled"] == told["trainable"] + told["excluded"] > 0
    assert told["logprob_max_abs_diff"] <= 1e-4
    steps = [json.loads(line) for line in (tmp_path / "run" / "steps.jsonl").read_text().splitlines()]
    assert all(step["polar/ledger/balanced"] == 1 for step in steps)
    # One task in eight compacts its history: two traces. Every other session of two calls gives one.
    assert all(1.0 <= step["polar/samples_per_trajectory"] < 1.5 for step in steps)
    assert all(step["polar/calls/continued"] > 0.35 * step["polar/calls/completions"] for step in steps)
    assert (tmp_path / "run" / "reward.png").stat().st_size > 1000


def test_a_run_folder_that_is_in_use_is_refused(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("do not touch")
    command = [sys.executable, "-m", "polar", "demo", "--run-dir", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "not empty" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_reward_rises(tmp_path: Path, seed: int) -> None:
    told = demo(tmp_path / "run", "--seed", str(seed))
    assert told["reward_first"] <= 0.5
    assert told["reward_last"] >= 0.8
