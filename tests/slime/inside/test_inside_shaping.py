"""Advantages are made exactly where this Slime's own default would normalise rewards, and scaled exactly where it
would divide them by their standard deviation."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import slime.utils.arguments
from tests.bridge.making import group
from tests.slime.inside.inside_manager import manager_with

from slime_bridge.reward_post_process import NORMALISED, post_process_rewards

OFFERED = re.search(
    r'"--advantage-estimator".*?choices=\[(.*?)\]', Path(slime.utils.arguments.__file__).read_text(), re.DOTALL
)


def estimators() -> list[str]:
    assert OFFERED is not None
    return re.findall(r'"(\w+)"', OFFERED[1])


def rewarded() -> list[Any]:
    """Two trajectories of one trace each: both ways of grouping then agree but for a factor."""
    samples = group(2)
    for sample, reward in zip(samples, (3.0, 0.0), strict=True):
        sample.reward, sample.response_length, sample.loss_mask = reward, 1, [1]
    return samples


@pytest.mark.parametrize("estimator", estimators())
@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.parametrize("std", [True, False])
def test_where_slime_would(estimator: str, normalise: bool, std: bool):
    samples = rewarded()
    changed = {"advantage_estimator": estimator, "rewards_normalization": normalise, "grpo_std_normalization": std}
    manager = manager_with([[[sample] for sample in samples]], **changed)
    ours = post_process_rewards(manager.args, samples)
    manager.custom_reward_post_process_func = None
    theirs = manager._post_process_rewards(samples)
    assert ours[0] == theirs[0]
    baseline_of_others = 2.0 if estimator in NORMALISED and normalise else 1.0
    assert ours[1] == pytest.approx([baseline_of_others * value for value in theirs[1]], rel=1e-5)
