"""Python's collector of cycles, set for a process that makes many objects and few cycles."""

from __future__ import annotations

import gc

_THRESHOLDS = (20_000, 20, 20)


def collect_rarely() -> None:
    """With Python's own thresholds (700, 10, 10) the collector takes a seventh of a model call's CPU and as much of a
    start's. What is there already, modules for the most part, is never looked at again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_THRESHOLDS)
