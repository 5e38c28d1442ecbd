"""Leave-one-trajectory-out advantages: every trajectory counts once, however many traces it was cut into.

value(trajectory) = mean reward of its counting traces; baseline = mean value of the group's *other* valid trajectories;
advantage(trace) = its reward − baseline, with `std` divided by the standard deviation (n − 1) of the group's values.
What failed, was aborted or removed is in no baseline and gets 0.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

LARGEST_REWARD = 1e30
"""Trainers compute in float32, which ends at 3.4e38."""
ROUNDING = 1e-9
"""Values of a group that differ by less, relatively, are equal: a mean of K equal rewards is not exactly the reward."""


@dataclass(frozen=True)
class ScoredTrace:
    group: Hashable
    trajectory: Hashable
    reward: float
    counts: bool
    """has a trainable token, and its trajectory neither failed nor was aborted or removed"""


def finite(reward: Any) -> float | None:
    """The reward as a number that a trainer can compute with, or None: then it is no reward at all, and not 0."""
    if type(reward) is not float:
        if not isinstance(reward, Real):
            return None
        reward = float(reward)
    return reward if abs(reward) <= LARGEST_REWARD else None


def shape(traces: Sequence[ScoredTrace], *, std: bool, single_survivor: str = "zero") -> list[float]:
    """Advantages [N] of traces [N]. `single_survivor`: a group with one valid trajectory gets 0 ("zero") or its
    reward as it is ("raw")."""
    groups: dict[Hashable, dict[Hashable, list[float]]] = defaultdict(lambda: defaultdict(list))
    for trace in traces:
        if trace.counts:
            groups[trace.group][trace.trajectory].append(trace.reward)
    baselines = {group: _Baseline(rewards, std, single_survivor) for group, rewards in groups.items()}
    return [baselines[trace.group].advantage(trace) if trace.counts else 0.0 for trace in traces]


class _Baseline:
    def __init__(self, rewards: dict[Hashable, list[float]], std: bool, single_survivor: str) -> None:
        self.values = {trajectory: math.fsum(each) / len(each) for trajectory, each in rewards.items()}
        self.total = math.fsum(self.values.values())
        self.raw = single_survivor == "raw"
        spread = max(self.values.values()) - min(self.values.values())
        self.equal = spread <= ROUNDING * max(1.0, max(map(abs, self.values.values())))
        self.scale = self._deviation() if std else 1.0

    def advantage(self, trace: ScoredTrace) -> float:
        others = len(self.values) - 1
        if others == 0:
            return trace.reward if self.raw else 0.0
        if self.scale == 0.0:
            return 0.0
        own = self.values[trace.trajectory]
        baseline = own if self.equal else (self.total - own) / others
        return (trace.reward - baseline) / self.scale

    def _deviation(self) -> float:
        count = len(self.values)
        if self.equal or count < 2:
            return 0.0
        mean = self.total / count
        return math.sqrt(math.fsum((value - mean) ** 2 for value in self.values.values()) / (count - 1))
