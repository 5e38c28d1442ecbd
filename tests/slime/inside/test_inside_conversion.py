"""What the bridge returns goes through the real conversion and the real split, and comes out as it went in."""

from __future__ import annotations

import dataclasses

import pytest
from tests.bridge.making import group, session, task, trace
from tests.slime.inside.inside_manager import manager_with, train_data_of

from polar.records import Termination
from slime_bridge import standalone
from slime_bridge.acceptance import Group, judge
from slime_bridge.adapter import ConversionRules
from slime_bridge.slime_types import Sample, grouping_field


def accepted(*sessions, group_index: int = 0, rules: ConversionRules | None = None) -> list[list[Sample]]:
    source = group(len(sessions), group_index=group_index, first=group_index * len(sessions))
    verdict = judge(task(*sessions), source, rules or ConversionRules(), submitted=0, min_fraction=0.0)
    assert isinstance(verdict, Group)
    return verdict.samples


def two_groups() -> list[list[list[Sample]]]:
    """Fan-out, a failed session, a session without a usable trace, and a plain one."""
    first = accepted(session(0, trace(), trace(prompt=6, mask=(0, 1)), trace()), session(1, trace(reward=0.0)))
    second = accepted(
        session(0, termination=Termination.SANDBOX_START), session(1, trace(reward=0.5, mask=(1,))), group_index=1
    )
    return [first, second]


def test_the_types_are_slimes_and_ours_have_their_fields():
    assert Sample.__module__.startswith("slime.utils")
    ours = {field.name for field in dataclasses.fields(standalone.Sample)}
    theirs = {field.name for field in dataclasses.fields(Sample)}
    assert ours - {"group_id"} <= theirs
    if grouping_field() == "group_id":
        assert ours == theirs
        assert standalone.Sample().to_dict() == Sample().to_dict()


def test_real_conversion_keeps_every_number_and_counts_a_trajectory_once():
    groups = two_groups()
    flat, data = train_data_of(manager_with(groups))
    assert data["group_ids"] == [0, 0, 0, 1, 2, 3]
    assert data["group_mask_sums"] == [7, 7, 7, 3, 0, 1]
    assert data["response_lengths"] == [4, 2, 4, 4, 1, 1]
    assert data["tokens"][1] == [100, 101, 102, 103, 104, 105, 200, 201]
    assert [list(mask) for mask in data["loss_masks"]] == [[1, 1, 0, 1], [0, 1], [1, 1, 0, 1], [1, 1, 0, 1], [0], [1]]
    assert len(data["rollout_log_probs"]) == len(flat) == 6
    assert data["rewards"] == [1.0, 1.0, 1.0, -1.0, 0.0, 0.0]
    assert data["raw_reward"] == [1.0, 1.0, 1.0, 0.0, 0.0, 0.5]


def test_the_real_split_places_every_sample_once():
    manager = manager_with(two_groups())
    _, data = train_data_of(manager)
    if "rollout_ids" in data:
        del data["group_ids"], data["group_mask_sums"]
    ranks = [box.inner for box in manager._split_train_data_by_dp(data)]
    placed = sorted(position for rank in ranks for position in rank["partition"])
    assert placed == list(range(6))
    for rank in ranks:
        for tokens, length, mask, logprobs in zip(
            rank["tokens"], rank["response_lengths"], rank["loss_masks"], rank["rollout_log_probs"], strict=True
        ):
            assert len(mask) == len(logprobs) == length < len(tokens)


def test_the_bridges_nest_is_the_one_that_slime_checks():
    groups = two_groups()
    setattr(groups[0][0][0], grouping_field(), 77)
    with pytest.raises(AssertionError, match="must share"):
        manager_with(groups)._get_rollout_data(0)


def test_a_reward_dict_goes_through_reward_key():
    rules = ConversionRules(reward_keys=("acc",))
    groups = [accepted(session(0, trace()), session(1, trace(reward=0.0)), rules=rules)]
    flat, data = train_data_of(manager_with(groups, reward_key="acc"))
    assert [sample.get_reward_value(manager_with(groups, reward_key="acc").args) for sample in flat] == [1.0, 0.0]
    assert data["rewards"] == [1.0, -1.0]
