"""Slime's reward post-process: shapes where Slime's own default would normalise, and passes rewards on elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from slime_bridge.shaping import ScoredTrace, finite, shape
from slime_bridge.slime_types import trajectory_of

NORMALISED = frozenset({"grpo", "gspo", "cispo", "reinforce_plus_plus_baseline"})
DIVIDED_BY_STD = NORMALISED - {"reinforce_plus_plus_baseline"}


def post_process_rewards(args: Any, samples: Sequence[Any]) -> tuple[list[float], list[float]]:
    """(raw [N], shaped [N]) of the flat samples [N], in their order; both finite."""
    rewards = [_reward(args, sample) for sample in samples]
    raw = [reward or 0.0 for reward in rewards]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in NORMALISED or not getattr(args, "rewards_normalization", True):
        return raw, raw
    traces = [
        ScoredTrace(sample.group_index, trajectory_of(sample), reward or 0.0, reward is not None and _counts(sample))
        for sample, reward in zip(samples, rewards, strict=True)
    ]
    std = estimator in DIVIDED_BY_STD and getattr(args, "grpo_std_normalization", True)
    return raw, shape(traces, std=std, single_survivor=getattr(args, "polar_single_survivor", "zero"))


def _reward(args: Any, sample: Any) -> float | None:
    """None: it has none, and is in no baseline; the trainer then sees 0.0."""
    value = sample.reward
    if isinstance(value, dict):
        value = value.get(getattr(args, "reward_key", None) or getattr(args, "polar_reward_key", None) or "score")
    return finite(value)


def _counts(sample: Any) -> bool:
    """Whether the sample, if it has a reward, stands in its group's baseline."""
    if sample.remove_sample or sample.status.value in ("failed", "aborted"):
        return False
    return sample.response_length > 0 if sample.loss_mask is None else any(sample.loss_mask)
