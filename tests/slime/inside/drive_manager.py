"""Slime's real RolloutManager as a Ray actor, driven as its training loops drive it; no trainer behind it.

`python -m tests.slime.inside.drive_manager OUT ENGINE FLAGS…`: an evaluation and three rollouts, and the save of the
second one called after the third was generated, as an asynchronous loop does. Then a second manager goes on from what
was saved. OUT gets what each rank of the trainer would have had, and what Slime logged.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from pathlib import Path
from typing import Any

import httpx
import ray
import torch
from slime.ray.rollout import RolloutManager
from slime.utils.arguments import parse_args
from tests.slime.inside.logged import logged
from tests.slime.inside.under_ray import small_ray

PARALLEL = {"dp_size": 2, "cp_size": 1, "vpp_size": 1, "microbatch_group_size_per_vp_stage": 1}
RENAMED = {"rollout_ids": "group_ids", "rollout_mask_sums": "group_mask_sums"}


class Manager:
    """One actor; every call waits for its answer."""

    def __init__(self, args: Any, load: int) -> None:
        self._actor = RolloutManager.options(num_cpus=1, num_gpus=0).remote(args, (None, [], []))
        self("set_train_parallel_config", PARALLEL)
        self("load", load)

    def __call__(self, name: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._actor, name).remote(*arguments))

    def ranks(self, rollout_id: int) -> list[dict[str, Any]]:
        return [_plain(ray.get(box.inner)) for box in self("generate", rollout_id)]

    def end(self) -> None:
        self("dispose")
        ray.kill(self._actor)


def _plain(data: dict[str, Any]) -> dict[str, Any]:
    """Under the names of v0.3.0, tensors as lists."""
    return {RENAMED.get(name, name): json.loads(json.dumps(value, default=_listed)) for name, value in data.items()}


def _listed(value: Any) -> Any:
    return value.tolist()


def _versions(args: Any, rollout_id: int) -> list[list[str]]:
    kept = torch.load(args.save_debug_rollout_data.format(rollout_id=rollout_id), weights_only=False)
    return [sample["weight_versions"] for sample in kept["samples"]]


def main(out: Path, engine: str) -> None:
    args = parse_args()
    told: dict[str, Any] = {}
    with small_ray():
        first = Manager(args, -1)
        first("eval", 0)
        for rollout_id in range(3):
            httpx.post(f"{engine}/control/version", json=str(rollout_id + 1), trust_env=False)
            told[f"first/{rollout_id}"] = first.ranks(rollout_id)
            told[f"versions/{rollout_id}"] = _versions(args, rollout_id)
        first("save", 1)
        first.end()
        again = copy.deepcopy(args)
        again.load = args.save
        second = Manager(again, 1)
        for rollout_id in (2, 3):
            told[f"second/{rollout_id}"] = second.ranks(rollout_id)
        second.end()
    told["log"] = logged(os.environ["TENSORBOARD_DIR"])
    out.write_text(json.dumps(told))


if __name__ == "__main__":
    where, url = sys.argv[1:3]
    del sys.argv[1:3]
    main(Path(where), url)
