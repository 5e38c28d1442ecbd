"""Hypothesis is derandomised and has no deadline, so that a slow machine never turns a green test red. The files that
take longest come first, so that no worker is left with one at the end."""

from __future__ import annotations

import gc

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "polar",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("polar")
gc.disable()  # what is imported and collected is never garbage, and looking for some takes a fifth of that time

LONGEST = (
    "test_linters.py",
    "test_on_miles.py",
    "test_api_fuzz.py",
    "test_kill_seeds.py",
    "test_laws.py",
    "test_case_041_nothing_is_left.py",
    "test_serve.py",
    "test_disk_full.py",
    "test_chain.py",
    "test_retention.py",
    "test_case_056_one_that_never_ends.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
