"""A session's result becomes the trainer's samples, with everything aligned, or is refused by name."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import fields, make_dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bridge import slow_model
from tests.bridge.making import group, session, task, trace
from tests.bridge.real_results import task_results

from polar.records import Termination
from slime_bridge.acceptance import Group, judge
from slime_bridge.adapter import convert_session, session_result_to_samples
from slime_bridge.fitting import ConversionRules, RolloutLogprobError
from slime_bridge.slime_types import GroupingError, Sample, grouping_field, trajectory_of

RULES = ConversionRules()


def source_of(**changed):
    (source,) = group(1, group_index=4, first=17)
    for name, value in changed.items():
        setattr(source, name, value)
    return source


def test_one_sample_a_trace_each_a_copy_of_the_sources():
    source = source_of()
    first, second = session_result_to_samples(session(0, trace(), trace(prompt=5, mask=(0, 1), reward=0.5)), source)
    assert first.tokens == [100, 101, 102, 200, 201, 202, 203]
    assert (first.response_length, first.loss_mask) == (4, [1, 1, 0, 1])
    assert first.rollout_log_probs == [-0.5, -0.5, 0.0, -0.5]
    assert (first.reward, second.reward) == (1.0, 0.5)
    assert first.prompt == [{"role": "user", "content": "find it"}]
    assert first.response == "looking\nls({})\n[tool] a.txt\nfound"
    assert (first.label, first.index, first.group_index) == ("42", 17, 4)
    assert trajectory_of(first) == trajectory_of(second) == 17
    assert [sample.metadata["polar"]["trace_index"] for sample in (first, second)] == [0, 1]
    assert first.metadata["source"] == "set"
    assert source.metadata == {"source": "set"}
    assert source.tokens == []


def test_metadata_tells_of_the_session():
    (sample,) = session_result_to_samples(session(0, trace()), source_of())
    told = sample.metadata["polar"]
    assert (told["session_id"], told["task_id"], told["termination"], told["attempt"]) == (
        "session-0",
        "task",
        "done",
        1,
    )
    assert set(told["timing"]) >= {"init_ms", "run_ms", "e2e_ms"}
    assert told["tokens"] == {"sampled": 5, "trainable": 3, "excluded": {"aborted": 2}, "attempt_discarded": 0}
    assert told["weight_versions"] == [[0, 4, "1"]]
    assert told["error"] is None


def test_nothing_that_can_change_is_shared_with_the_source_or_a_sibling():
    source = source_of(metadata={"task": {"files": ["a"]}})
    first, second = session_result_to_samples(session(0, trace(), trace()), source)
    (placeholder,) = session_result_to_samples(None, source)
    for sample in (first, placeholder):
        sample.metadata["task"]["files"].append("b")
        sample.spec_info.spec_verify_ct = 7
        sample.prefix_cache_info.cached_tokens = 7
    first.metadata["polar"]["tokens"]["sampled"] = 0
    for other in (source, second):
        assert other.metadata["task"] == {"files": ["a"]}
        assert (other.spec_info.spec_verify_ct, other.prefix_cache_info.cached_tokens) == (0, 0)
    assert second.metadata["polar"]["tokens"]["sampled"] == 8


def test_versions_are_named_once_a_trainable_span():
    spans = [(0, 2, "7"), (2, 3, "8"), (3, 4, "9")]
    (sample,) = session_result_to_samples(session(0, trace(versions=spans)), source_of())
    assert sample.weight_versions == ["7", "9"]
    assert sample.metadata["polar"]["weight_versions"] == [list(span) for span in spans]


@pytest.mark.parametrize(("keys", "reward"), [((), 1.0), (("acc",), {"acc": 1.0})])
def test_a_reward_is_a_dict_only_where_slime_has_a_key_for_it(keys: tuple[str, ...], reward: object):
    (sample,) = session_result_to_samples(session(0, trace()), source_of(), ConversionRules(reward_keys=keys))
    assert sample.reward == reward


@pytest.mark.parametrize("termination", list(Termination))
def test_the_table_of_endings_decides_status_and_gradient(termination: Termination):
    status, trained = slow_model.ENDINGS[termination.value]
    converted = convert_session(session(0, trace(), termination=termination), source_of(), RULES)
    (sample,) = converted.samples
    assert sample.status.value == status
    assert (converted.trained > 0) is trained
    assert sample.remove_sample is not trained
    assert converted.arrived == converted.trained + converted.unused.total() == 3


def test_a_faults_own_name_is_an_infrastructure_fault():
    result = session(0, termination=Termination.INFRASTRUCTURE)
    result.metadata["termination"] = "engine_down"
    (sample,) = session_result_to_samples(result, source_of())
    assert (sample.status.value, sample.remove_sample) == ("failed", True)


def test_a_spent_agent_budget_is_trained_where_the_setting_says_so():
    result = session(0, trace(), termination=Termination.AGENT_TIMEOUT)
    (sample,) = session_result_to_samples(result, source_of(), ConversionRules(timeout_policy="truncate"))
    assert (sample.status.value, sample.reward, sum(sample.loss_mask)) == ("truncated", 1.0, 3)


def test_a_last_completion_cut_by_length_is_truncated():
    (sample,) = session_result_to_samples(session(0, trace(finish="length")), source_of())
    assert (sample.status.value, sum(sample.loss_mask)) == ("truncated", 3)


def test_a_server_that_names_no_termination_is_judged_by_the_status():
    result = session(0, trace(), termination=Termination.AGENT_TIMEOUT, metadata={"session_index": 0})
    (sample,) = session_result_to_samples(result, source_of())
    assert (sample.status.value, sample.remove_sample) == ("aborted", True)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf"), -1e38])
def test_a_reward_that_is_no_number_to_train_with_is_failed_masked_and_zero(reward: float | None):
    (sample,) = session_result_to_samples(session(0, trace(reward=reward)), source_of())
    assert (sample.status.value, sample.reward, sample.remove_sample) == ("failed", 0.0, True)


@pytest.mark.parametrize("result", [None, session(0, termination=Termination.NO_CALLS), session(0, trace(prompt=0))])
def test_a_session_without_a_usable_trace_is_one_masked_placeholder(result):
    (sample,) = session_result_to_samples(result, source_of())
    assert (sample.tokens, sample.response_length, sample.response) == ([0, 0], 1, "")
    assert (sample.loss_mask, sample.rollout_log_probs, sample.weight_versions) == ([0], [0.0], [])
    assert (sample.reward, sample.remove_sample, sample.status.value) == (0.0, True, "failed")
    assert (trajectory_of(sample), sample.group_index, sample.label) == (17, 4, "42")


LEFT_OVER = {
    "train_metadata": {"loss": "x"},
    "teacher_log_probs": [0.5],
    "rollout_routed_experts": [[1]],
    "multimodal_train_inputs": {"pixels": 1},
    "metadata": {"source": "set", "raw_reward": 3.0, "round_number": 2},
    "tokens": [1, 2],
    "weight_versions": ["old"],
    "remove_sample": True,
}


@pytest.mark.parametrize("result", [None, session(0, trace())])
def test_what_slime_takes_from_all_samples_once_one_has_it_is_on_none(result):
    """A source's samples may have been through a rollout before, and each prompt has its own metadata."""
    (sample,) = session_result_to_samples(result, source_of(**LEFT_OVER))
    (clean,) = session_result_to_samples(result, source_of())
    assert sample == clean


@pytest.mark.parametrize(
    "logprobs", [None, [-0.1, -0.1], [-0.1, float("nan"), 0.0, -0.1], [-0.1, -0.1, 0.0, float("-inf")]]
)
def test_case_017_a_trainable_token_without_a_logprob_is_refused_by_name(logprobs: list[float] | None):
    bad = session(1, trace(logprobs=None if logprobs is None else np.array(logprobs)))
    with pytest.raises(RolloutLogprobError):
        session_result_to_samples(bad, source_of())


@pytest.mark.parametrize("mask", [(1, 2, 0, 1), (1, 1)])
def test_a_mask_that_is_none_is_refused_by_name(mask: tuple[int, ...]):
    wrong = trace()
    wrong.loss_mask = np.array(mask, np.uint8)
    with pytest.raises(RolloutLogprobError, match="mask"):
        session_result_to_samples(session(0, wrong), source_of())


def test_a_trace_without_a_token_to_train_needs_no_logprobs_and_is_counted():
    converted = convert_session(session(0, trace(), trace(mask=(0, 0), logprobs=None)), source_of(), RULES)
    assert (len(converted.samples), converted.dropped_traces, converted.trained) == (1, {"empty": 1}, 3)


def test_a_trace_without_a_prompt_has_no_first_logit_and_is_counted():
    converted = convert_session(session(0, trace(prompt=0), trace()), source_of(), RULES)
    assert (len(converted.samples), converted.unused, converted.trained) == (1, {"empty": 3}, 3)
    assert converted.dropped_traces == {"empty": 1}


@pytest.mark.parametrize(
    ("overlong", "cap", "mask"),
    [("drop", 6, None), ("clip", 6, [1, 1, 0]), ("clip", 4, [1]), ("clip", 3, None), ("clip", 7, [1, 1, 0, 1])],
)
def test_an_overlong_trace_is_dropped_or_clipped_to_its_causal_prefix(overlong: str, cap: int, mask: list[int] | None):
    rules = ConversionRules(overlong=overlong, max_tokens=cap)
    converted = convert_session(session(0, trace(versions=[(0, 2, "1"), (2, 4, "2")])), source_of(), rules)
    (sample,) = converted.samples
    if mask is None:
        assert sample.remove_sample
        assert (converted.unused, converted.dropped_traces) == ({"overlong": 3}, {"overlong": 1})
        return
    assert sample.loss_mask == mask
    assert sample.tokens == [100, 101, 102, 200, 201, 202, 203][: 3 + len(mask)]
    assert sample.rollout_log_probs == [-0.5 * trained for trained in mask]
    assert sample.response_length == len(mask)
    assert sample.metadata["polar"]["weight_versions"] == (
        [[0, 2, "1"], [2, len(mask), "2"]] if cap > 5 else [[0, 1, "1"]]
    )
    assert converted.unused["overlong"] == 3 - sum(mask)
    assert converted.clipped_traces == (cap < 7)


OldSample = make_dataclass(
    "OldSample",
    [(each.name, each.type, each) for each in fields(Sample) if each.name not in ("group_id", "rollout_id")],
)


def test_a_trainer_without_a_grouping_id_takes_one_trace_a_session_and_refuses_more_by_name():
    source = OldSample(index=17, group_index=4)
    assert grouping_field(OldSample) is None
    (sample,) = session_result_to_samples(session(0, trace()), source)
    assert (type(sample), trajectory_of(sample)) == (OldSample, 17)
    assert not hasattr(sample, "group_id")
    with pytest.raises(GroupingError, match=r"2 traces of one session.*neither group_id nor rollout_id"):
        session_result_to_samples(session(0, trace(), trace()), source)


@pytest.mark.parametrize("name", ["group_id", "rollout_id"])
def test_the_grouping_id_is_the_one_that_the_trainers_sample_has(name: str):
    kind = make_dataclass("Kind", [("index", int), (name, int | None, None)])
    assert grouping_field(kind) == name
    assert trajectory_of(kind(index=3)) == 3
    assert trajectory_of(kind(3, 8)) == 8


def test_sessions_are_placed_by_their_index_and_a_missing_one_is_a_placeholder():
    result = task(session(2, trace(reward=0.2)), session(0, trace(reward=0.0), trace(reward=0.0)))
    verdict = judge(result, group(3), RULES, submitted=0, min_fraction=0.0)
    assert isinstance(verdict, Group)
    assert [[sample.reward for sample in samples] for samples in verdict.samples] == [[0.0, 0.0], [0.0], [0.2]]
    removed = [[sample.remove_sample for sample in samples] for samples in verdict.samples]
    assert removed == [[False] * 2, [True], [False]]


@settings(max_examples=60)
@given(
    task_results(),
    st.builds(
        ConversionRules,
        overlong=st.sampled_from(["drop", "clip"]),
        max_tokens=st.none() | st.integers(2, 12),
        timeout_policy=st.sampled_from(["mask", "truncate"]),
    ),
    st.integers(0, 1000),
)
def test_any_accepted_group_of_real_sessions_is_what_the_slow_model_says(drawn, rules: ConversionRules, first: int):
    result, size = drawn
    source = group(size, group_index=3, first=first)
    verdict = judge(result, source, rules, submitted=0, min_fraction=0.0)
    expected = slow_model.verdict(result, size, rules, 0.0)
    if not isinstance(verdict, Group):
        return
    assert isinstance(expected, list)
    assert len(verdict.samples) == size
    for one, session_, samples in zip(source, expected, verdict.samples, strict=True):
        assert isinstance(samples, list)
        assert {trajectory_of(sample) for sample in samples} == {one.index}
        assert {sample.status.value for sample in samples} == {session_.status}
        if not session_.sequences:
            (placeholder,) = samples
            assert (placeholder.tokens, placeholder.loss_mask, placeholder.remove_sample) == ([0, 0], [0], True)
            continue
        for sequence, sample in zip(session_.sequences, samples, strict=True):
            check_sample(sample, sequence)
    check_uniform([sample for samples in verdict.samples for sample in samples])


def check_sample(sample: Sample, sequence: slow_model.Sequence) -> None:
    assert sample.tokens == sequence.prompt + [token.id for token in sequence.response]
    assert sample.loss_mask == [int(token.trained) for token in sequence.response]
    assert sample.rollout_log_probs == [token.logprob for token in sequence.response]
    assert sample.reward == sequence.reward
    assert not sample.remove_sample
    assert sample.metadata["polar"]["trace_index"] == sequence.trace_index
    named = [name for start, end, name in sample.metadata["polar"]["weight_versions"] for _ in range(start, end)]
    told = Counter(token.version for token in sequence.response if token.version is not None)
    assert Counter(named) == told
    trained = {token.version for token in sequence.response if token.trained and token.version is not None}
    assert set(sample.weight_versions) == trained


def check_uniform(samples: list[Sample]) -> None:
    optional = [
        {each.name for each in fields(sample) if getattr(sample, each.name) is None and each.name != "label"}
        for sample in samples
    ]
    assert all(missing == optional[0] for missing in optional)
    for sample in samples:
        assert 1 <= sample.response_length < len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert all(type(value) is int for value in sample.loss_mask + sample.tokens)
        assert all(type(value) is float and math.isfinite(value) for value in sample.rollout_log_probs)
        assert type(sample.reward) is float
        assert type(sample.response) is str
        assert sample.status.value != "pending"


@pytest.mark.parametrize(
    ("message", "text"),
    [
        ({"role": "assistant", "content": "done"}, "done"),
        ({"role": "assistant", "reasoning_content": "hm", "content": "done"}, "<think>hm</think>\ndone"),
        ({"role": "assistant", "reasoning": "hm", "content": None}, "<think>hm</think>"),
        (
            {"role": "assistant", "tool_calls": [{"function": {"name": "ls", "arguments": {"in": "é"}}}]},
            'ls({"in": "é"})',
        ),
        ({"role": "assistant", "tool_calls": [{"name": "ls", "arguments": "{bad"}]}, "ls({bad)"),
        ({"role": "tool", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}, "[tool] a<image_url>"),
        ({"role": "user", "content": ["a", "b"]}, "[user] ab"),
        ({"role": "user", "content": ""}, ""),
        ({}, ""),
    ],
)
def test_the_response_is_readable_text_whatever_the_messages_hold(message, text: str):
    one = trace()
    one.response_messages = [message]
    (sample,) = session_result_to_samples(session(0, one), source_of())
    assert sample.response == text
