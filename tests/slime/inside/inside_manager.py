"""Slime's own rollout manager without Ray: its methods as plain methods."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import slime.ray.rollout as manager_module

from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.slime_types import RolloutFnTrainOutput


class Store:
    """Stands where Ray's object store is."""

    @staticmethod
    def put(value: Any) -> Any:
        return value


def manager_with(groups: list[Any], **changed: Any) -> Any:
    """A manager whose rollout function returns `groups`."""
    manager_module.ray = Store
    manager = object.__new__(manager_module.RolloutManager.__ray_metadata__.modified_class)
    settings = {
        "load_debug_rollout_data": None,
        "reward_key": None,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
        "n_samples_per_prompt": len(groups[0]),
        "rollout_batch_size": len(groups),
        "global_batch_size": len(groups) * len(groups[0]),
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 64,
        "micro_batch_size": 1,
        "balance_data": False,
        "balance_by_flops": False,
        "rollout_top_p": 1.0,
        "rollout_data_transport": "object-store",
    }
    manager.args = SimpleNamespace(**(settings | changed))
    manager.data_source = None
    manager.custom_reward_post_process_func = post_process_rewards
    manager.custom_convert_samples_to_train_data_func = None
    manager.generate_rollout = lambda args, rollout_id, data_source, evaluation=False: RolloutFnTrainOutput(groups, {})
    manager.train_parallel_config = {
        "dp_size": 2,
        "cp_size": 1,
        "vpp_size": 1,
        "microbatch_group_size_per_vp_stage": 1,
    }
    return manager


def train_data_of(manager: Any) -> tuple[list[Any], dict[str, Any]]:
    """(flat samples, train data), with this version's names of the grouping id told apart by what is there."""
    flat, _ = manager._get_rollout_data(0)
    data = manager._convert_samples_to_train_data(flat)
    for new, old in (("rollout_ids", "group_ids"), ("rollout_mask_sums", "group_mask_sums")):
        if new in data:
            data.setdefault(old, data[new])
    return flat, data
