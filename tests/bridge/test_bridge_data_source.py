"""Whole epochs: every prompt at least once, none lost over save and load, the surplus of the rounding counted."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bridge.making import arguments

from polar.errors import ConfigError
from slime_bridge import standalone
from slime_bridge.data_source import CeilEpochRolloutDataSourceWithBuffer


def source(folder, *, prompts: int = 10, batch: int = 4, **changed):
    path = folder / f"prompts-{prompts}.jsonl"
    path.write_text("".join(json.dumps({"q": f"p{n}", "a": str(n), "info": {"n": n}}) + "\n" for n in range(prompts)))
    settings = {
        "prompt_data": str(path),
        "input_key": "q",
        "label_key": "a",
        "metadata_key": "info",
        "n_samples_per_prompt": 2,
        "rollout_batch_size": batch,
        "save": str(folder),
        "load": str(folder),
    }
    return CeilEpochRolloutDataSourceWithBuffer(arguments(**(settings | changed)))


def prompts_of(groups) -> list[str]:
    return [group[0].prompt for group in groups]


def test_a_prompt_becomes_a_group_with_its_label_and_metadata(tmp_path):
    groups = source(tmp_path).get_samples(2)
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2, 3]]
    assert [[sample.group_index for sample in group] for group in groups] == [[0, 0], [1, 1]]
    assert (groups[1][0].label, groups[1][0].metadata) == ("1", {"n": 1})
    assert groups[1][0].metadata is not groups[1][1].metadata


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("prompts", "batch"), [(10, 4), (8, 4), (3, 4), (1, 8), (7, 7)])
def test_every_epoch_has_every_prompt_and_the_surplus_is_counted(tmp_path, shuffle: bool, prompts: int, batch: int):
    data = source(tmp_path, prompts=prompts, batch=batch, rollout_shuffle=shuffle)
    batches = len(data) // batch
    assert batches == -(-prompts // batch)
    for epoch in range(3):
        seen = Counter(prompt for _ in range(batches) for prompt in prompts_of(data.get_samples(batch)))
        assert len(seen) == prompts
        assert data.surplus_prompts == (epoch + 1) * (batches * batch - prompts)


@given(sizes=st.lists(st.integers(0, 30), max_size=6), shuffle=st.booleans())
def test_requests_of_any_size_give_the_same_stream(tmp_path_factory, sizes: list[int], shuffle: bool):
    folder = tmp_path_factory.mktemp("data")
    whole = source(folder, rollout_shuffle=shuffle).get_samples(sum(sizes))
    piecewise = source(folder, rollout_shuffle=shuffle)
    pieces = [group for size in sizes for group in piecewise.get_samples(size)]
    assert prompts_of(pieces) == prompts_of(whole)
    assert [group[0].index for group in pieces] == [2 * number for number in range(sum(sizes))]


@pytest.mark.parametrize("shuffle", [False, True])
def test_the_stream_goes_on_after_save_and_load(tmp_path, shuffle: bool):
    first = source(tmp_path, rollout_shuffle=shuffle)
    first.get_samples(15)
    first.save(3)
    again = source(tmp_path, rollout_shuffle=shuffle)
    again.load(3)
    assert prompts_of(again.get_samples(9)) == prompts_of(first.get_samples(9))
    assert again.surplus_prompts == first.surplus_prompts


def test_what_was_taken_and_not_returned_comes_first_after_a_restart_and_is_counted(tmp_path):
    first = source(tmp_path)
    groups = first.take(6)
    first.returned(0, groups[:2])
    first.dropped(groups[2])
    first.save(0)
    again = source(tmp_path)
    again.load(0)
    assert again.resumed_groups == 3
    resumed = again.get_samples(4)
    assert prompts_of(resumed) == ["p3", "p4", "p5", "p6"]
    assert [group[0].index for group in resumed] == [6, 8, 10, 12]
    assert resumed[0][0].status.value == "pending"


def test_a_save_that_comes_after_the_next_rollout_was_generated_loses_nothing(tmp_path):
    first = source(tmp_path)
    first.returned(0, first.take(2))
    first.returned(1, first.take(2))
    first.save(0)
    again = source(tmp_path)
    again.load(0)
    assert prompts_of(again.get_samples(3)) == ["p2", "p3", "p4"]


def test_groups_handed_back_come_first_and_survive_a_restart(tmp_path):
    first = source(tmp_path)
    groups = first.get_samples(2)
    first.add_samples(groups[1:])
    first.save(0)
    assert prompts_of(first.get_samples(2)) == ["p1", "p2"]
    again = source(tmp_path)
    again.load(0)
    assert prompts_of(again.get_samples(2)) == ["p1", "p2"]
    with pytest.raises((ValueError, AssertionError), match="n_samples_per_prompt"):
        first.add_samples([groups[0][:1]])


def test_a_missing_state_starts_anew_and_nothing_is_written_where_nothing_is_saved(tmp_path):
    fresh = source(tmp_path)
    fresh.load(41)
    assert prompts_of(fresh.get_samples(1)) == ["p0"]
    source(tmp_path, save=None).save(0)
    assert not (tmp_path / "rollout").exists()


def test_bad_prompts_are_named(tmp_path):
    with pytest.raises(ConfigError, match="has no prompts"):
        source(tmp_path, prompts=0)
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"q": 1}\n{"q": \n')
    for path, named in ((bad, r"bad.jsonl, line 2"), (tmp_path / "absent.jsonl", "absent"), ("rows.csv", "rows.csv")):
        with pytest.raises(ConfigError, match=named):
            list(standalone.read_file(str(path)))
