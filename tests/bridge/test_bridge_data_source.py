"""Whole epochs: every prompt at least once, none lost over save and load, the surplus of the rounding counted."""

from __future__ import annotations

import copy
import json
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bridge.making import arguments

from polar.errors import ConfigError
from slime_bridge import standalone
from slime_bridge.data_source import CeilEpochRolloutDataSourceWithBuffer
from slime_bridge.slime_types import Sample


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


def test_a_missing_state_starts_anew_and_nothing_is_written_where_nothing_is_saved(tmp_path, caplog):
    fresh = source(tmp_path)
    fresh.load(-1)
    assert caplog.text == "", "a run that begins has none"
    fresh.load(41)
    assert "polar_data_source_41.json: the prompts begin anew behind rollout 41" in caplog.text
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


TEMPLATE = {"agent": {"harness": "x", "env": {"A": "{sample.metadata.repo}"}}, "timeout_seconds": "{sample.index}"}


@pytest.mark.parametrize(
    ("row", "changed", "named"),
    [
        ({"question": "x"}, {}, r"no 'q' \(it has question\); --input-key says which key holds the prompt"),
        ({"q": None}, {}, "the prompt 'q' is null, neither text nor a list of messages; --input-key"),
        ({"q": 7}, {}, "the prompt 'q' is 7, neither text nor a list of messages; --input-key"),
        ({"q": "  "}, {}, "the prompt 'q' is empty; --input-key"),
        ({"q": []}, {}, "the prompt 'q' is empty"),
        ({"q": ["hi"]}, {}, "the prompt 'q' has \"hi\", which is no message"),
        ({"q": [{"content": 5}]}, {}, r"the prompt 'q' has \{\"content\": 5\}, which is no message"),
        ({"q": "x"}, {"label_key": "a"}, r"no 'a' \(it has q\); --label-key says which key holds the label"),
        ({"q": "x", "info": "str"}, {}, "its 'info' is 'str', no mapping; --metadata-key"),
        (
            {"q": "x"},
            {"polar_task_template": TEMPLATE},
            r"polar_task_template.agent.env.A: unknown placeholder {sample.metadata.repo}: at 'repo', it has nothing; "
            "--metadata-key says which key holds the metadata",
        ),
        ([], {}, r"\[\] is no mapping"),
    ],
)
def test_a_row_that_no_task_can_be_made_of_is_named_at_the_start(tmp_path, row, changed: dict, named: str):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in ({"q": "x", "a": "", "info": {"repo": 1}}, row)))
    with pytest.raises(ConfigError, match=rf"prompt_data .*rows\.jsonl, row 2: {named}"):
        source(tmp_path, prompt_data=str(path), **({"label_key": None} | changed))


def test_rows_that_can_be_used_are(tmp_path):
    """An empty prompt where the instruction does without it, tools that Slime adds, a label that is null."""
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"q": "", "a": None, "t": [], "info": None}) + "\n")
    template = TEMPLATE | {"agent": {"harness": "x", "env": {"A": "{sample.metadata.tools} {{sample.metadata.b}}"}}}
    settings = {"tool_key": "t", "polar_task_template": template, "polar_instruction_template": "Do it"}
    assert prompts_of(source(tmp_path, prompt_data=str(path), **settings).get_samples(1)) == [""]


def test_a_prompt_file_that_cannot_be_read_is_named(tmp_path):
    for name in ("absent.jsonl", "rows.csv"):
        with pytest.raises(ConfigError, match=rf"prompt_data: .*{name}"):
            source(tmp_path, prompt_data=str(tmp_path / name))


def test_what_is_handed_back_is_saved_once_and_keeps_its_numbers(tmp_path):
    first = source(tmp_path)
    groups = first.take(3)
    first.add_samples(groups[1:2])
    first.save(0)
    again = source(tmp_path)
    again.load(0)
    assert [group[0].group_index for group in again.get_samples(4)] == [0, 2, 1, 3]


def test_groups_of_others_get_numbers_that_nobody_has(tmp_path):
    """A group without any, a copy of one that is out, the same one twice, and one with numbers yet to be given."""
    data = source(tmp_path)
    out, returned = data.take(2)
    data.returned(0, [returned])
    stranger = [Sample(prompt="mine"), Sample(prompt="mine")]
    future = [Sample(prompt="later", group_index=99, index=198), Sample(prompt="later", group_index=99, index=199)]
    data.add_samples([stranger, [copy.copy(sample) for sample in out], returned, returned, future])
    groups = data.get_samples(5)
    assert prompts_of(groups) == ["mine", "p0", "p1", "p1", "later"]
    assert groups[2] is returned
    numbers = [sample.index for group in [out, *groups, *data.get_samples(3)] for sample in group]
    assert len(set(numbers)) == len(numbers)
    assert [sample.index for sample in out] == [0, 1]


def newest_first(args, rollout_id, buffer, num_samples):
    """As a buffer_filter_path of a user's."""
    return [buffer.pop() for _ in range(min(num_samples, len(buffer)))]


def test_a_buffer_filter_is_honoured(tmp_path):
    data = source(tmp_path, buffer_filter_path=f"{__name__}.newest_first")
    data.add_samples(data.get_samples(3))
    assert prompts_of(data.get_samples(4)) == ["p2", "p1", "p0", "p3"]


def test_a_buffer_filter_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match=r"buffer_filter_path: cannot load 'no\.such\.filter'"):
        standalone.load_function("no.such.filter")


def test_metadata_beyond_json_is_kept_or_refused_by_name(tmp_path):
    data = source(tmp_path)
    ((sample, _),) = data.take(1)
    sample.metadata = {"vector": np.arange(3), "number": np.float32(0.5)}
    data.save(0)
    again = source(tmp_path)
    again.load(0)
    assert again.get_samples(1)[0][0].metadata == {"vector": [0, 1, 2], "number": 0.5}
    sample.metadata = {"thing": object()}
    with pytest.raises(ConfigError, match="metadata_key: object"):
        data.save(1)


def test_a_broken_state_is_named(tmp_path):
    data = source(tmp_path)
    data.save(0)
    path = tmp_path / "rollout" / "polar_data_source_0.json"
    path.write_text(path.read_text()[:-9])
    with pytest.raises(ConfigError, match=r"load: .*polar_data_source_0\.json"):
        data.load(0)


DEEDS = st.lists(
    st.tuples(st.sampled_from(["take", "return", "drop", "hand back", "restart"]), st.integers(1, 7)), max_size=25
)


@given(deeds=DEEDS, shuffle=st.booleans())
def test_no_group_is_lost_or_given_out_twice_whatever_happens(tmp_path_factory, deeds, shuffle: bool):
    """Groups are the numbers 0, 1, 2, … each of which ends as returned or dropped once, over restarts too."""
    folder = tmp_path_factory.mktemp("data")
    data = source(folder, rollout_shuffle=shuffle)
    out, ended = [], []
    for rollout_id, (deed, count) in enumerate(deeds):
        some = out[:count]
        if deed == "take":
            out += data.take(count)
        elif deed == "restart":
            data.save(rollout_id)
            data = source(folder, rollout_shuffle=shuffle)
            data.load(rollout_id)
            assert data.resumed_groups == len(data.buffer) >= len(out)
            out = []
        else:
            out = out[count:]
            if deed == "hand back":
                data.add_samples(some)
                continue
            ended += some
            if deed == "return":
                data.returned(rollout_id, some)
            else:
                for group in some:
                    data.dropped(group)
        assert len({group[0].group_index for group in out}) == len(out)
    known = [group[0].group_index for group in [*ended, *out, *data.get_samples(len(data.buffer))]]
    assert sorted(known) == list(range(data.sample_group_index))
    expected = prompts_of(source(folder, rollout_shuffle=shuffle).get_samples(data.sample_group_index))
    assert all(group[0].prompt == expected[group[0].group_index] for group in [*ended, *out])
