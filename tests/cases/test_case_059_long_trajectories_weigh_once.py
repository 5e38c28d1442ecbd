"""Case 59: long trajectories weighed more in mean, std and loss; broadcast left most steps with advantage 0."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from polar.records import SessionResult, SessionStatus, TaskResult, TaskState, Trace, Trajectory
from slime_bridge.acceptance import Group, judge
from slime_bridge.adapter import ConversionRules
from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.slime_types import Sample, trajectory_of


def trace(reward: float) -> Trace:
    return Trace(
        prompt_ids=np.array([1, 2]),
        response_ids=np.array([5, 6, 7]),
        loss_mask=np.array([1, 0, 1]),
        response_logprobs=np.array([-0.5, 0.0, -0.25]),
        reward=reward,
    )


def session(index: int, traces: int, reward: float) -> SessionResult:
    trajectory = Trajectory(status=SessionStatus.COMPLETED, traces=[trace(reward) for _ in range(traces)])
    metadata = {"session_index": index, "termination": "done"}
    return SessionResult(
        session_id=f"s{index}", task_id="t", status=SessionStatus.COMPLETED, trajectory=trajectory, metadata=metadata
    )


def test_one_and_seven_traces_weigh_the_same():
    source = [Sample(group_index=0, index=index) for index in (40, 41)]
    result = TaskResult(task_id="t", status=TaskState.COMPLETED, results=[session(1, 7, 0.0), session(0, 1, 1.0)])
    group = judge(result, source, ConversionRules(), submitted=0, min_fraction=1.0)
    assert isinstance(group, Group)
    samples = [sample for session_samples in group.samples for sample in session_samples]
    args = SimpleNamespace(advantage_estimator="grpo", rewards_normalization=True, grpo_std_normalization=False)
    raw, advantages = post_process_rewards(args, samples)
    assert raw == [1.0] + [0.0] * 7
    assert advantages == [1.0] + [-1.0] * 7

    mass = {40: 0.0, 41: 0.0}
    for sample, advantage in zip(samples, advantages, strict=True):
        denominator = sum(sum(other.loss_mask) for other in samples if trajectory_of(other) == trajectory_of(sample))
        mass[trajectory_of(sample)] += advantage * sum(sample.loss_mask) / denominator
    assert mass == pytest.approx({40: 1.0, 41: -1.0})
