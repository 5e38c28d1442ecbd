"""What this machine has for sandboxes, where the settings do not say otherwise."""

from __future__ import annotations

import os

from polar.config import ResourceSettings
from polar.records import Resources

_MEBIBYTE = 1 << 20


def resources(settings: ResourceSettings) -> Resources:
    """The CPUs that this process may run on and all memory; no GPU that is not named."""
    cpus = len(os.sched_getaffinity(0)) if settings.cpus is None else settings.cpus
    memory = _memory_mb() if settings.memory_mb is None else settings.memory_mb
    return Resources(cpus=cpus, memory_mb=memory, gpus=settings.gpus)


def _memory_mb() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // _MEBIBYTE
