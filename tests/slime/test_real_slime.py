"""The bridge on the real Slime without Ray: conversion, DP split, loss, plugin contracts, flags, and its own tests."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.slime.checkouts import TESTS, needs_slime, on_every_checkout, run_on

QUIET = ("-m", "pytest", "-q", "-s", "-p", "no:cacheprovider", "-W", "ignore", "--timeout=900")


@needs_slime
@on_every_checkout
@pytest.mark.timeout(900)
def test_conversion_split_loss_contracts_and_flags(checkout: Path):
    output = run_on(checkout, *QUIET, str(TESTS / "slime" / "inside"), seconds=840)
    for line in output.splitlines():
        if "measured:" in line:
            print(f"{checkout.name}: {line}")


@needs_slime
@on_every_checkout
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_bridges_own_tests_on_slimes_types(checkout: Path):
    own = [str(TESTS / "bridge"), str(TESTS / "cases" / "test_case_059_long_trajectories_weigh_once.py")]
    run_on(checkout, *QUIET, "-m", "not slow", *own, seconds=1740)
