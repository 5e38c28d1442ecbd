"""Slime's reward hook. The evaluator has scored the session already: this hands out what the rollout stored."""

from __future__ import annotations

from typing import Any


async def reward_func(args: Any, sample: Any, **_: Any) -> Any:
    """The reward of one sample, or the rewards of a list of samples, as Slime's reward_key wants them.

    Raises ValueError for a sample that no rollout has scored.
    """
    if isinstance(sample, list):
        return [_stored(one) for one in sample]
    return _stored(sample)


def _stored(sample: Any) -> Any:
    if sample.reward is None:
        raise ValueError(
            f"sample {sample.index} has no reward: rollouts are scored by the task's evaluator, so "
            "--rollout-function-path must be slime_bridge.rollout.generate_rollout_polar_async"
        )
    return sample.reward
