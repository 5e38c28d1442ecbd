"""A session's result becomes the trainer's samples, with everything aligned, or is refused by name."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.bridge.making import group, session, task, trace

from polar.endings import TABLE
from polar.records import Drop, TaskState, Termination
from slime_bridge.acceptance import Dropped, Group, judge
from slime_bridge.adapter import ConversionRules, RolloutLogprobError, convert_session, session_result_to_samples
from slime_bridge.slime_types import Sample, trajectory_of

RULES = ConversionRules()


def judged(result, source, rules=RULES, min_fraction=0.0):
    return judge(result, source, rules, submitted=0, min_fraction=min_fraction)


def test_one_sample_a_trace_each_a_copy_of_the_sources():
    (source,) = group(1, group_index=4, first=17)
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
    assert first.metadata["polar"]["session_id"] == "session-0"
    assert first.metadata["source"] == "set"
    assert source.metadata == {"source": "set"}
    assert source.tokens == []


def test_versions_are_named_once_a_trainable_span():
    spans = [(0, 2, "7"), (2, 3, "8"), (3, 4, "9")]
    (sample,) = session_result_to_samples(session(0, trace(versions=spans)), group(1)[0])
    assert sample.weight_versions == ["7", "9"]
    assert sample.metadata["polar"]["weight_versions"] == [list(span) for span in spans]


def test_a_reward_is_a_dict_only_where_slime_has_a_key_for_it():
    rules = ConversionRules(reward_keys=("acc",))
    (sample,) = session_result_to_samples(session(0, trace()), group(1)[0], rules)
    assert sample.reward == {"acc": 1.0}


@pytest.mark.parametrize("termination", list(Termination))
def test_the_table_of_endings_decides_status_and_gradient(termination: Termination):
    ending = TABLE[termination]
    converted = convert_session(session(0, trace(), termination=termination), group(1)[0], RULES)
    (sample,) = converted.samples
    assert sample.status.value == ending.slime.value
    assert (converted.trained > 0) == ending.trained
    assert sample.remove_sample is not ending.trained
    assert converted.arrived == converted.trained + converted.unused.total() == 3


def test_a_spent_agent_budget_is_trained_where_the_setting_says_so():
    result = session(0, trace(), termination=Termination.AGENT_TIMEOUT)
    (sample,) = session_result_to_samples(result, group(1)[0], ConversionRules(timeout_policy="truncate"))
    assert (sample.status.value, sample.reward, sum(sample.loss_mask)) == ("truncated", 1.0, 3)


def test_a_last_completion_cut_by_length_is_truncated():
    (sample,) = session_result_to_samples(session(0, trace(finish="length")), group(1)[0])
    assert (sample.status.value, sum(sample.loss_mask)) == ("truncated", 3)


def test_a_server_that_names_no_termination_is_judged_by_the_status():
    result = session(0, trace(), termination=Termination.AGENT_TIMEOUT, metadata={"session_index": 0})
    (sample,) = session_result_to_samples(result, group(1)[0])
    assert (sample.status.value, sample.remove_sample) == ("aborted", True)


@pytest.mark.parametrize("reward", [None, float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_failed_masked_and_zero(reward: float | None):
    (sample,) = session_result_to_samples(session(0, trace(reward=reward)), group(1)[0])
    assert (sample.status.value, sample.reward, sample.remove_sample) == ("failed", 0.0, True)
    assert (sample.tokens, sample.response_length, sample.loss_mask) == ([0, 0], 1, [0])
    assert sample.rollout_log_probs == [0.0]


@pytest.mark.parametrize(
    "logprobs", [None, [-0.1, -0.1], [-0.1, float("nan"), 0.0, -0.1], [-0.1, -0.1, 0.0, float("-inf")]]
)
def test_case_017_a_trainable_token_without_a_logprob_refuses_the_group_by_name(logprobs: list[float] | None):
    bad = session(1, trace(logprobs=None if logprobs is None else np.array(logprobs)))
    with pytest.raises(RolloutLogprobError):
        session_result_to_samples(bad, group(1)[0])
    verdict = judged(task(session(0, trace()), bad), group(2))
    assert isinstance(verdict, Dropped)
    assert (verdict.reason, verdict.tokens, verdict.sessions) == (Drop.LOGPROB_ERROR, 6, 2)


def test_a_masked_trace_needs_no_logprobs():
    verdict = judged(task(session(0, trace(), trace(mask=(0, 0), logprobs=None))), group(1))
    assert isinstance(verdict, Group)
    assert [len(samples) for samples in verdict.samples] == [1]


@pytest.mark.parametrize(
    ("overlong", "cap", "mask"),
    [("drop", 6, None), ("clip", 6, [1, 1, 0]), ("clip", 4, [1]), ("clip", 3, None), ("clip", 7, [1, 1, 0, 1])],
)
def test_an_overlong_trace_is_dropped_or_clipped_to_its_causal_prefix(overlong: str, cap: int, mask: list[int] | None):
    rules = ConversionRules(overlong=overlong, max_tokens=cap)
    converted = convert_session(session(0, trace(versions=[(0, 2, "1"), (2, 4, "2")])), group(1)[0], rules)
    (sample,) = converted.samples
    if mask is None:
        assert sample.remove_sample
        assert converted.unused == {"overlong": 3}
    else:
        assert sample.loss_mask == mask
        assert len(sample.tokens) == 3 + len(mask)
        assert len(sample.rollout_log_probs) == sample.response_length == len(mask)
        assert all(end <= len(mask) for _, end, _ in sample.metadata["polar"]["weight_versions"])
        assert converted.unused.get("overlong", 0) == 3 - sum(mask)


def test_a_trace_without_a_prompt_has_no_first_logit_and_is_counted():
    converted = convert_session(session(0, trace(prompt=0), trace()), group(1)[0], RULES)
    assert (len(converted.samples), converted.unused, converted.trained) == (1, {"empty": 3}, 3)


def test_sessions_are_placed_by_their_index_and_a_missing_one_is_a_placeholder():
    verdict = judged(task(session(2, trace(reward=0.2)), session(0, trace(reward=0.0), trace(reward=0.0))), group(3))
    assert isinstance(verdict, Group)
    assert [[sample.reward for sample in samples] for samples in verdict.samples] == [[0.0, 0.0], [0.0], [0.2]]
    assert [[sample.remove_sample for sample in samples] for samples in verdict.samples] == [
        [False] * 2,
        [True],
        [False],
    ]


@pytest.mark.parametrize("indices", [(0, 0), (0, 5), (0, None)])
def test_sessions_that_name_no_sample_of_the_group_fail_it(indices: tuple[int, int | None]):
    sessions = [session(0, trace(), metadata={"session_index": index, "termination": "done"}) for index in indices]
    verdict = judged(task(*sessions), group(2))
    assert isinstance(verdict, Dropped)
    assert (verdict.reason, verdict.tokens) == (Drop.FAILED, 6)


@pytest.mark.parametrize("status", [TaskState.FAILED, TaskState.CANCELLED])
def test_a_task_that_failed_drops_its_group_and_tells_why(status: TaskState):
    lost = session(0, termination=Termination.SANDBOX_START, error="no user namespaces")
    verdict = judged(task(lost, status=status), group(1))
    assert isinstance(verdict, Dropped)
    assert verdict.reason is Drop.FAILED
    assert "no user namespaces" in verdict.why


def test_a_group_without_a_trainable_token_is_dropped():
    verdict = judged(task(session(0, trace(mask=(0, 0))), session(1, termination=Termination.NO_CALLS)), group(2))
    assert isinstance(verdict, Dropped)
    assert verdict.reason is Drop.ZERO_TRAINABLE


@pytest.mark.parametrize(("fraction", "accepted"), [(0.0, True), (0.5, True), (0.51, False), (1.0, False)])
def test_too_few_complete_sessions_drop_the_group(fraction: float, accepted: bool):
    result = task(session(0, trace()), session(1, trace(), termination=Termination.AGENT_TIMEOUT))
    verdict = judged(result, group(2), min_fraction=fraction)
    assert isinstance(verdict, Group) is accepted
    if isinstance(verdict, Dropped):
        assert verdict.reason is Drop.LOW_COMPLETE_FRACTION


TRACE = st.builds(
    lambda prompt, mask, reward: trace(prompt=prompt, mask=tuple(mask), reward=reward),
    st.integers(0, 4),
    st.lists(st.integers(0, 1), max_size=8),
    st.sampled_from([0.0, 1.0, None, float("nan")]),
)
SESSION = st.tuples(st.lists(TRACE, max_size=4), st.sampled_from(list(Termination)))


@given(
    st.lists(SESSION, min_size=1, max_size=5),
    st.sampled_from(["drop", "clip"]),
    st.none() | st.integers(1, 10),
    st.randoms(),
)
def test_any_group_is_nested_aligned_numbered_and_balanced(sessions, overlong, cap, random):
    source = group(len(sessions), group_index=3, first=30)
    results = [session(index, *traces, termination=ending) for index, (traces, ending) in enumerate(sessions)]
    random.shuffle(results)
    verdict = judged(task(*results), source, ConversionRules(overlong=overlong, max_tokens=cap))
    if isinstance(verdict, Dropped):
        assert verdict.reason is Drop.ZERO_TRAINABLE
        return
    assert verdict.arrived == verdict.trained + verdict.unused.total()
    assert len(verdict.samples) == len(source)
    flat = [sample for samples in verdict.samples for sample in samples]
    assert verdict.trained == sum(sum(sample.loss_mask) for sample in flat)
    for one, samples in zip(source, verdict.samples, strict=True):
        assert isinstance(samples, list)
        assert samples
        assert {trajectory_of(sample) for sample in samples} == {one.index}
    for sample in flat:
        assert isinstance(sample, Sample)
        assert 1 <= sample.response_length < len(sample.tokens)
        assert len(sample.loss_mask) == len(sample.rollout_log_probs) == sample.response_length
        assert all(type(value) is int for value in sample.loss_mask + sample.tokens)
        assert all(type(value) is float for value in sample.rollout_log_probs)
        assert math.isfinite(sample.reward)
        assert cap is None or len(sample.tokens) <= max(cap, 2)
        assert sample.status.value != "pending"
