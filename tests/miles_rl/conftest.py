"""`inside/` runs in a process that has miles-rl on its path (test_on_miles.py starts it), and nowhere else."""

from __future__ import annotations

import os

from tests.bridge.conftest import gateway, house, make_trainer, server

__all__ = ["gateway", "house", "make_trainer", "server"]

collect_ignore = [] if os.environ.get("POLAR_INSIDE_MILES") else ["inside"]
