"""A group is trained whole or dropped whole: under the first name that fits, whatever the order of arrival."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bridge import slow_model
from tests.bridge.making import group, session, task, trace
from tests.bridge.real_results import task_results

from polar.records import Drop, TaskResult, TaskState, Termination
from slime_bridge.acceptance import Dropped, Group, judge
from slime_bridge.fitting import ConversionRules

RULES = ConversionRules()


def judged(result: TaskResult, source, rules: ConversionRules = RULES, min_fraction: float = 0.0) -> Group | Dropped:
    return judge(result, source, rules, submitted=0, min_fraction=min_fraction)


def dropped(result: TaskResult, size: int, min_fraction: float = 0.0) -> Dropped:
    verdict = judged(result, group(size), min_fraction=min_fraction)
    assert isinstance(verdict, Dropped)
    return verdict


UNGRADED = session(0, trace(reward=None))
MISALIGNED = session(1, trace(logprobs=None))
GOOD = [session(0, trace()), session(1, trace())]


@pytest.mark.parametrize("status", [TaskState.FAILED, TaskState.CANCELLED])
def test_a_task_that_failed_drops_its_group_and_tells_why(status: TaskState):
    lost = session(0, termination=Termination.SANDBOX_START, error="no user namespaces")
    verdict = dropped(task(lost, status=status), 1)
    assert verdict.reason is Drop.FAILED
    assert "no user namespaces" in verdict.why
    assert ("another run with the same --save?" in verdict.why) is (status is TaskState.CANCELLED)


@pytest.mark.parametrize("indices", [(0, 0), (0, 5), (0, None)])
def test_sessions_that_name_no_sample_of_the_group_fail_it(indices: tuple[int, int | None]):
    sessions = [session(0, trace(), metadata={"session_index": index, "termination": "done"}) for index in indices]
    verdict = dropped(task(*sessions), 2)
    assert (verdict.reason, verdict.tokens, verdict.sessions) == (Drop.FAILED, 6, 2)


def test_a_source_without_numbers_fails_its_group():
    source = group(2)
    source[1].index = None
    verdict = judged(task(*GOOD), source)
    assert isinstance(verdict, Dropped)
    assert verdict.reason is Drop.FAILED
    assert "no index" in verdict.why


def test_a_trainable_token_without_a_logprob_drops_the_whole_group():
    verdict = dropped(task(session(0, trace()), MISALIGNED), 2)
    assert (verdict.reason, verdict.tokens, verdict.sessions) == (Drop.LOGPROB_ERROR, 6, 2)
    assert verdict.why == "3 trainable tokens without logprobs"


@pytest.mark.parametrize(
    "sessions",
    [
        (),
        (session(0, trace(mask=(0, 0))), session(1, termination=Termination.NO_CALLS)),
        (session(0, trace(), termination=Termination.AGENT_TIMEOUT), session(1, trace(prompt=0))),
        (UNGRADED,),
    ],
)
def test_a_group_without_a_token_to_train_is_dropped(sessions):
    assert dropped(task(*sessions), 2).reason is Drop.ZERO_TRAINABLE


@pytest.mark.parametrize(
    ("sessions", "why"),
    [
        (
            (session(0, trace(prompt=20)), session(1, trace(prompt=10), trace(prompt=30))),
            "every trace is longer than polar_max_trajectory_tokens = 9 (the shortest has 14): "
            "raise --max-tokens-per-gpu, or polar_overlong: clip",
        ),
        (
            (session(0, trace(reward=math.inf)), session(1, trace(reward=math.inf))),
            "its reward inf is no number a trainer can use (finite, at most 1e+30) ×2",
        ),
        ((UNGRADED,), "no reward: the evaluator gave none ×1; never came back ×1"),
        (
            (session(0, trace(), termination=Termination.AGENT_TIMEOUT), session(1, trace(prompt=9))),
            "ending is masked: agent_timeout (polar_timeout_policy) ×1; "
            "every trace is longer than polar_max_trajectory_tokens = 9 ×1",
        ),
        (
            (session(0, trace(mask=(0,))), session(1, trace(mask=(0,)), trace(prompt=9))),
            "no token of it is trainable ×1; "
            "no token of it is trainable, but for 1 traces over polar_max_trajectory_tokens = 9 ×1",
        ),
        (
            (session(0, error="died"), session(1)),
            "no trace: no call to the model was recorded ×2 (session session-0 ended as done: died)",
        ),
    ],
)
def test_a_group_with_nothing_to_train_is_dropped_with_its_true_cause(sessions, why: str):
    verdict = judged(task(*sessions), group(2), ConversionRules(max_tokens=9))
    assert isinstance(verdict, Dropped)
    assert verdict.reason is Drop.ZERO_TRAINABLE
    assert why in verdict.why


@pytest.mark.parametrize(("fraction", "accepted"), [(0.0, True), (0.5, True), (0.51, False), (1.0, False)])
@pytest.mark.parametrize(
    "other",
    [
        session(1, trace(), termination=Termination.AGENT_TIMEOUT),
        session(1, trace(mask=(0, 0))),
        session(1, trace(reward=None)),
    ],
)
def test_complete_sessions_with_a_token_to_train_are_a_fraction_of_the_group(other, fraction: float, accepted: bool):
    verdict = judged(task(session(0, trace()), other), group(2), min_fraction=fraction)
    assert isinstance(verdict, Group) is accepted
    if isinstance(verdict, Dropped):
        assert (verdict.reason, verdict.why) == (Drop.LOW_COMPLETE_FRACTION, "1 of 2 sessions complete")


@pytest.mark.parametrize(
    ("result", "fraction", "first"),
    [
        (task(MISALIGNED, status=TaskState.FAILED), 1.0, Drop.FAILED),
        (task(UNGRADED, MISALIGNED), 1.0, Drop.LOGPROB_ERROR),
        (task(UNGRADED), 1.0, Drop.ZERO_TRAINABLE),
        (task(UNGRADED, GOOD[1]), 1.0, Drop.LOW_COMPLETE_FRACTION),
    ],
)
def test_the_first_name_that_fits_is_the_groups(result: TaskResult, fraction: float, first: Drop):
    assert dropped(result, 2, fraction).reason is first


@settings(max_examples=40)
@given(
    task_results(),
    st.builds(
        ConversionRules,
        overlong=st.sampled_from(["drop", "clip"]),
        max_tokens=st.none() | st.integers(1, 12),
        timeout_policy=st.sampled_from(["mask", "truncate"]),
    ),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.randoms(),
)
def test_any_real_group_is_judged_as_the_contract_says(drawn, rules: ConversionRules, fraction: float, random):
    result, size = drawn
    verdict = judged(result, group(size), rules, fraction)
    random.shuffle(result.results)
    again = judged(result, group(size), rules, fraction)
    expected = slow_model.verdict(result, size, rules, fraction)
    if isinstance(verdict, Dropped):
        assert expected == verdict.reason.value
        assert isinstance(again, Dropped)
        assert (again.reason, again.tokens, again.sessions) == (verdict.reason, verdict.tokens, size)
        return
    assert isinstance(expected, list)
    assert verdict.trained == sum(each.trained for each in expected)
    assert verdict.arrived == verdict.trained + verdict.unused.total()
    assert isinstance(again, Group)
    assert again.samples == verdict.samples
