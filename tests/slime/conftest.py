"""`inside/` runs in a process that has Slime on its path (test_real_slime.py starts it), and nowhere else."""

from __future__ import annotations

import os

collect_ignore = [] if os.environ.get("POLAR_INSIDE_SLIME") else ["inside"]
