"""Every trajectory counts once in its group's baseline, whatever its number of traces."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.shaping import ScoredTrace, shape
from slime_bridge.slime_types import Sample, grouping_field, trajectory_of

REWARDS = st.floats(-10, 10).map(lambda value: round(value, 3))
TRACES = st.lists(
    st.builds(
        ScoredTrace,
        group=st.integers(0, 3),
        trajectory=st.integers(0, 4),
        reward=REWARDS,
        counts=st.booleans(),
    ),
    max_size=20,
)


def one_trace_each(rewards: list[float], group: int = 0) -> list[ScoredTrace]:
    return [ScoredTrace(group, (group, index), reward, True) for index, reward in enumerate(rewards)]


def test_one_success_among_eight_with_std():
    shaped = shape(one_trace_each([1, 0, 0, 0, 0, 0, 0, 0]), std=True)
    assert shaped[0] == pytest.approx(2.83, abs=0.01)
    assert shaped[1:] == [pytest.approx(-0.40, abs=0.01)] * 7


def test_equal_rewards_give_zero_and_not_rounding_noise_divided_by_itself():
    traces = [ScoredTrace(0, trajectory, 0.1, True) for trajectory in range(5) for _ in range(trajectory + 1)]
    assert shape(traces, std=True) == [0.0] * len(traces)
    assert shape(traces, std=False) == pytest.approx([0.0] * len(traces), abs=1e-12)


def test_a_single_survivor_is_zero_or_raw_as_asked():
    traces = [*one_trace_each([0.7]), ScoredTrace(0, "lost", 0.0, False)]
    assert shape(traces, std=True) == [0.0, 0.0]
    assert shape(traces, std=True, single_survivor="raw") == [0.7, 0.0]


@given(TRACES, st.randoms())
def test_the_order_of_traces_is_irrelevant_and_everything_is_finite(traces: list[ScoredTrace], random):
    order = list(range(len(traces)))
    random.shuffle(order)
    shaped = shape(traces, std=True)
    again = shape([traces[position] for position in order], std=True)
    assert all(math.isfinite(value) for value in shaped)
    assert again == pytest.approx([shaped[position] for position in order], abs=1e-6)


SHARED = st.tuples(
    st.integers(0, 2),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.25, 1.0, -2.0, float("nan"), float("inf"), None]),
    st.sampled_from(["completed", "completed", "truncated", "failed", "aborted"]),
    st.sampled_from([(1,), (0, 1), (1, 1, 1), (0,)]),
    st.sampled_from([False, False, False, True]),
)
"""group, trajectory, reward, status, mask, remove_sample"""


@given(st.lists(SHARED, max_size=24), st.booleans(), st.sampled_from(["zero", "raw"]))
def test_any_samples_are_shaped_as_the_slow_model_says(drawn, std: bool, single: str):
    samples = []
    for group, trajectory, reward, status, mask, removed in drawn:
        samples.append(sample(reward, group=group, trajectory=10 * group + trajectory, status=status, mask=mask))
        samples[-1].remove_sample = removed
    raw, shaped = post_process_rewards(arguments(grpo_std_normalization=std, polar_single_survivor=single), samples)
    assert all(type(value) is float and math.isfinite(value) for value in raw + shaped)
    assert shaped == pytest.approx([slow_advantage(one, samples, std, single) for one in samples], abs=1e-6)


def slow_advantage(one: Sample, samples: list[Sample], std: bool, single: str) -> float:
    def valid(each: Sample) -> bool:
        number = each.reward is not None and math.isfinite(each.reward)
        lost = each.remove_sample or each.status.value in ("failed", "aborted")
        return number and not lost and sum(each.loss_mask) > 0

    values = {
        name: statistics.fmean(each.reward for each in samples if valid(each) and trajectory_of(each) == name)
        for name in {trajectory_of(each) for each in samples if valid(each) and each.group_index == one.group_index}
    }
    if not valid(one):
        return 0.0
    others = [value for name, value in values.items() if name != trajectory_of(one)]
    if not others:
        return one.reward if single == "raw" else 0.0
    deviation = statistics.stdev(values.values())
    if std and deviation < 1e-9:
        return 0.0
    return (one.reward - statistics.fmean(others)) / (deviation if std else 1.0)


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=2, max_size=8), st.integers(1, 7))
def test_cutting_a_trajectory_into_more_traces_changes_no_advantage(rewards: list[float], pieces: int):
    whole = shape(one_trace_each(rewards), std=True)
    cut = [trace for trace in one_trace_each(rewards) for _ in range(pieces if trace.trajectory == (0, 0) else 1)]
    shaped = shape(cut, std=True)
    assert shaped[:pieces] == pytest.approx([whole[0]] * pieces)
    assert shaped[pieces:] == pytest.approx(whole[1:])


def sample(reward: object, *, group: int, trajectory: int, status: str = "completed", mask: tuple[int, ...] = (1,)):
    made = Sample(group_index=group, index=trajectory, reward=reward, response_length=len(mask), loss_mask=list(mask))
    setattr(made, grouping_field(), trajectory)
    made.status = Sample.Status(status)
    return made


def arguments(**changed: object) -> SimpleNamespace:
    base = {"advantage_estimator": "grpo", "rewards_normalization": True, "grpo_std_normalization": False}
    return SimpleNamespace(**(base | {"reward_key": None} | changed))


def test_failed_aborted_and_removed_trajectories_stand_in_no_baseline():
    samples = [sample(1.0, group=0, trajectory=0), sample(0.0, group=0, trajectory=1)]
    samples += [sample(9.0, group=0, trajectory=2, status=status) for status in ("failed", "aborted")]
    removed = sample(9.0, group=0, trajectory=4)
    removed.remove_sample = True
    masked = sample(9.0, group=0, trajectory=5, mask=(0, 0))
    unscored = sample(float("nan"), group=0, trajectory=6)
    raw, shaped = post_process_rewards(arguments(), [*samples, removed, masked, unscored])
    assert shaped == [1.0, -1.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    assert raw == [1.0, 0.0, 9.0, 9.0, 9.0, 9.0, 0.0]


def test_rewards_are_any_kind_of_number_and_none_is_too_large_for_the_trainer():
    rewards = [np.float32(0.5), 1, True, 1e30, -1e30, 1e31, "1"]
    raw, shaped = post_process_rewards(
        arguments(), [sample(reward, group=0, trajectory=number) for number, reward in enumerate(rewards)]
    )
    assert raw == [0.5, 1.0, 1.0, 1e30, -1e30, 0.0, 0.0]
    assert all(math.isfinite(np.float32(value)) for value in shaped)
    assert shaped[-2:] == [0.0, 0.0]


def test_rewards_are_shaped_in_place_whatever_the_order():
    samples = [
        sample(float(trajectory == 2), group=group, trajectory=8 * group + trajectory)
        for trajectory, group in ((2, 1), (0, 0), (1, 1), (1, 0), (2, 0), (0, 1))
    ]
    _, shaped = post_process_rewards(arguments(), samples)
    assert shaped == [1.0, -0.5, -0.5, -0.5, 1.0, -0.5]


@pytest.mark.parametrize(
    ("estimator", "switches", "expected"),
    [
        ("grpo", {}, [1.0, -1.0]),
        ("cispo", {"grpo_std_normalization": True}, [1 / math.sqrt(0.5), -1 / math.sqrt(0.5)]),
        ("gspo", {"grpo_std_normalization": True}, [1 / math.sqrt(0.5), -1 / math.sqrt(0.5)]),
        ("reinforce_plus_plus_baseline", {"grpo_std_normalization": True}, [1.0, -1.0]),
        ("grpo", {"rewards_normalization": False}, [1.0, 0.0]),
        ("ppo", {}, [1.0, 0.0]),
        ("reinforce_plus_plus", {}, [1.0, 0.0]),
    ],
)
def test_shapes_exactly_where_slime_would_normalise(estimator: str, switches: dict[str, bool], expected: list[float]):
    samples = [sample(1.0, group=0, trajectory=0), sample(0.0, group=0, trajectory=1)]
    _, shaped = post_process_rewards(arguments(advantage_estimator=estimator, **switches), samples)
    assert shaped == pytest.approx(expected)


def test_a_reward_dict_is_read_by_reward_key_and_bare_args_work():
    samples = [sample({"acc": 1.0}, group=0, trajectory=0), sample({"acc": 0.0}, group=0, trajectory=1)]
    assert post_process_rewards(arguments(reward_key="acc"), samples) == ([1.0, 0.0], [1.0, -1.0])
    raw, shaped = post_process_rewards(
        object(), [sample(0.5, group=0, trajectory=0), sample(1.5, group=0, trajectory=1)]
    )
    assert raw == [0.5, 1.5]
    assert len(shaped) == 2
