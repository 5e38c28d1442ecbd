"""What the bridge owes the trainer, written down a second time, as plainly as it can be."""

from __future__ import annotations

from collections.abc import Hashable, Mapping

import numpy as np


def advantages(rewards: Mapping[Hashable, float], *, std: bool) -> dict[Hashable, float]:
    """Of the trajectories of one prompt that are trained: the reward minus the mean of the others', with `std` divided
    by the standard deviation (n − 1) of all; 0 where there is no other, or no deviation."""
    found = dict.fromkeys(rewards, 0.0)
    if len(rewards) > 1:
        spread = float(np.std(list(rewards.values()), ddof=1)) if std else 1.0
        for name, reward in rewards.items():
            others = [value for other, value in rewards.items() if other != name]
            found[name] = (reward - float(np.mean(others))) / spread if spread else 0.0
    return found


def gradients(advantage: float, mask: list[int], mask_sum: int, global_batch_size: int) -> np.ndarray:
    """d loss / d logp of each response token of a sample; `mask_sum` is over all samples of its trajectory."""
    return -advantage * np.asarray(mask, float) / (max(mask_sum, 1) * global_batch_size)
