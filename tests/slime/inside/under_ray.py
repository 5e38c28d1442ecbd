"""Ray for one run, small: a GPU that is only a number, no dashboard, and its files in a folder that goes with it."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

import ray

PASSED_ON = ("PYTHONPATH", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "TENSORBOARD_DIR", "PYTHONWARNINGS")


@contextlib.contextmanager
def small_ray() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="polar-ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            num_cpus=4,
            num_gpus=1,
            object_store_memory=100 << 20,
            include_dashboard=False,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
            runtime_env={"env_vars": {name: os.environ[name] for name in PASSED_ON if name in os.environ}},
        )
        try:
            yield
        finally:
            ray.shutdown()
