"""Ray for one run, small: a GPU that is only a number, no dashboard, and its files in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import ray

PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TENSORBOARD_DIR", "PYTHONWARNINGS")
TRIES = 3


@contextlib.contextmanager
def small_ray() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="polar-ray-", ignore_cleanup_errors=True) as folder:
        _start(folder)
        try:
            yield
        finally:
            ray.shutdown()


def _start(folder: str) -> None:
    """Again where it was too slow: Ray gives its own processes a fixed time, and a busy machine takes longer."""
    for tries_left in reversed(range(TRIES)):
        try:
            ray.init(
                num_cpus=4,
                num_gpus=1,
                object_store_memory=100 << 20,
                include_dashboard=False,
                _temp_dir=folder,
                runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
            )
            return
        except Exception as error:
            if tries_left == 0 or "timed out during startup" not in str(error):
                raise
            ray.shutdown()
