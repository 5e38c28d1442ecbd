"""Every trajectory counts once in its group's baseline, whatever its number of traces."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.shaping import ScoredTrace, shape
from slime_bridge.slime_types import Sample, grouping_field

REWARDS = st.floats(-10, 10).map(lambda value: round(value, 3))
TRACES = st.lists(
    st.builds(
        ScoredTrace,
        group=st.integers(0, 3),
        trajectory=st.integers(0, 4),
        reward=REWARDS,
        counts=st.booleans(),
    ),
    max_size=40,
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


@pytest.mark.parametrize("std", [False, True])
def test_case_058_uneven_groups_with_failures_never_mix(std: bool):
    sizes = [3, 2, 3, 1]
    traces = [trace for group, size in enumerate(sizes) for trace in one_trace_each([1.0] + [0.0] * (size - 1), group)]
    failed = ScoredTrace(1, "failed", 0.0, False)
    shaped = shape([*traces, failed], std=std)
    assert shaped[-1] == 0.0
    assert shaped[-2] == 0.0, "a group of one has no baseline"
    for group, size in enumerate(sizes[:3]):
        start = sum(sizes[:group])
        alone = shape(one_trace_each([1.0] + [0.0] * (size - 1)), std=std)
        assert shaped[start : start + size] == pytest.approx(alone)
        assert max(map(abs, alone)) < 3


def test_a_single_survivor_is_zero_or_raw_as_asked():
    traces = [*one_trace_each([0.7]), ScoredTrace(0, "lost", 0.0, False)]
    assert shape(traces, std=True) == [0.0, 0.0]
    assert shape(traces, std=True, single_survivor="raw") == [0.7, 0.0]


@given(TRACES)
def test_advantages_are_reward_minus_the_mean_of_the_other_trajectories(traces: list[ScoredTrace]):
    for trace, advantage in zip(traces, shape(traces, std=False), strict=True):
        if not trace.counts:
            assert advantage == 0.0
            continue
        others: dict[object, list[float]] = {}
        for each in traces:
            if each.counts and each.group == trace.group and each.trajectory != trace.trajectory:
                others.setdefault(each.trajectory, []).append(each.reward)
        if not others:
            assert advantage == 0.0
        else:
            baseline = statistics.fmean(statistics.fmean(rewards) for rewards in others.values())
            assert advantage == pytest.approx(trace.reward - baseline, abs=1e-6)


@given(TRACES, st.randoms())
def test_the_order_of_traces_is_irrelevant_and_everything_is_finite(traces: list[ScoredTrace], random):
    order = list(range(len(traces)))
    random.shuffle(order)
    shaped = shape(traces, std=True)
    again = shape([traces[position] for position in order], std=True)
    assert all(math.isfinite(value) for value in shaped)
    assert again == pytest.approx([shaped[position] for position in order], abs=1e-6)


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
