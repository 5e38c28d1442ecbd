"""A scripted trainer: it calls the bridge's hooks in the way Slime calls them, and trains nothing."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

from slime_bridge.data_source import CeilEpochRolloutDataSourceWithBuffer
from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.rollout import generate_rollout_polar_async


@dataclass(frozen=True)
class Step:
    """One rollout as the trainer has it: the nest, the flat samples, rewards before and after shaping, metrics."""

    nest: list[list[list[Any]]]
    samples: list[Any]
    raw: list[float]
    rewards: list[float]
    metrics: dict[str, Any]

    @property
    def groups(self) -> list[int]:
        """Their numbers, in the order of the nest."""
        return [group[0][0].group_index for group in self.nest]


class Trainer:
    """Holds the data source over all rollouts; `args` are the test's to change between calls. As Slime does, it goes
    on behind rollout `after`, where its args.load has the state of that one."""

    def __init__(self, args: Any, *, after: int | None = None) -> None:
        self.args = args
        self.data_source = CeilEpochRolloutDataSourceWithBuffer(args)
        if after is not None:
            self.data_source.load(after)

    def rollout(self, rollout_id: int) -> Step:
        output = generate_rollout_polar_async(self.args, rollout_id, self.data_source, evaluation=False)
        nest = output.samples
        flat = list(chain.from_iterable(chain.from_iterable(nest)))
        raw, rewards = post_process_rewards(self.args, flat)
        assert len(raw) == len(rewards) == len(flat)
        return Step(nest, flat, raw, rewards, output.metrics)

    def evaluate(self, rollout_id: int) -> Any:
        return generate_rollout_polar_async(self.args, rollout_id, self.data_source, evaluation=True)

    def save(self, rollout_id: int) -> None:
        """The asynchronous loop does so when the next rollout has been generated."""
        self.data_source.save(rollout_id)
