"""Hypothesis is derandomised and has no deadline, so that a slow machine never turns a green test red."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "polar",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("polar")
