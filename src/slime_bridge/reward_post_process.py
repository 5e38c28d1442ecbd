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
    raw = [reward_value(args, sample) for sample in samples]
    estimator = getattr(args, "advantage_estimator", "grpo")
    if estimator not in NORMALISED or not getattr(args, "rewards_normalization", True):
        return raw, raw
    traces = [
        ScoredTrace(sample.group_index, trajectory_of(sample), reward, counts(args, sample))
        for sample, reward in zip(samples, raw, strict=True)
    ]
    std = estimator in DIVIDED_BY_STD and getattr(args, "grpo_std_normalization", True)
    return raw, shape(traces, std=std, single_survivor=getattr(args, "polar_single_survivor", "zero"))


def reward_value(args: Any, sample: Any) -> float:
    """The sample's reward as a finite number; 0.0 where it has none (such a sample is in no baseline)."""
    return _finite_reward(args, sample) or 0.0


def counts(args: Any, sample: Any) -> bool:
    """Whether the sample stands in its group's baseline."""
    lost = sample.remove_sample or sample.status.value in ("failed", "aborted")
    trainable = sample.response_length > 0 if sample.loss_mask is None else any(sample.loss_mask)
    return trainable and not lost and _finite_reward(args, sample) is not None


def _finite_reward(args: Any, sample: Any) -> float | None:
    value = sample.reward
    if isinstance(value, dict):
        value = value.get(getattr(args, "reward_key", None) or getattr(args, "polar_reward_key", None) or "score")
    return finite(value)
