"""Cases as far as the builders decide them: a log as a proxy leaves it, and the trajectory that follows from it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from peers.session_logs import ScriptedLog
from polar.records import BuildResult, Trace
from polar.requests import StrategySpec
from polar.trajectory import BUILDERS, load_builder

START, END_OF_TURN, NEWLINE = 1, 9, 198
USER, ASSISTANT, TOOL = [2, NEWLINE], [3, NEWLINE], [4, NEWLINE]
THINK = list(range(1000, 1037))


def build(script: ScriptedLog, strategy: str = "prefix_merging") -> BuildResult:
    result = load_builder(StrategySpec(strategy=strategy)).build(script.read())
    assert result.tokens.balanced
    return result


def trained(result: BuildResult) -> list[int]:
    return [int(i) for trace in result.traces for i in trace.response_ids[trace.loss_mask == 1]]


def whole(trace: Trace) -> list[int]:
    return [*trace.prompt_ids.tolist(), *trace.response_ids.tolist()]


def test_case_001_ids_are_carried_and_never_encoded_again(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([START, 5, *ASSISTANT], [50, 51, END_OF_TURN])
    retokenised = [START, 5, *ASSISTANT, 77, END_OF_TURN, NEWLINE, *TOOL, 6, *ASSISTANT]
    script.call(retokenised, [60, END_OF_TURN], after=first, source="engine")
    result = build(script)
    assert trained(result) == [50, 51, END_OF_TURN, 60, END_OF_TURN]
    assert result.traces[0].response_ids.tolist() == [50, 51, END_OF_TURN]
    assert result.calls.drift == 1
    assert result.tokens.excluded == {}


@pytest.mark.parametrize("strategy", BUILDERS)
def test_case_002_every_turn_has_the_context_that_the_engine_had(tmp_path: Path, strategy: str) -> None:
    script = ScriptedLog(tmp_path)
    shown = [START, 5, *ASSISTANT, 77, END_OF_TURN, NEWLINE, *TOOL, 6, *ASSISTANT]
    first = script.call([START, 5, *ASSISTANT], [50, 51, END_OF_TURN])
    script.call(shown, [60, END_OF_TURN], after=first, source="engine")
    one, two = build(script, strategy).traces
    assert whole(one) == [START, 5, *ASSISTANT, 50, 51, END_OF_TURN]
    assert whole(two) == [*shown, 60, END_OF_TURN]
    assert (one.trainable, two.trainable) == (3, 2)


def test_case_002_with_tokens_in_the_two_turns_are_one_trace(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([START, 5, *ASSISTANT], [50, 51, END_OF_TURN])
    shown = [START, 5, *ASSISTANT, 50, 51, END_OF_TURN, NEWLINE, *TOOL, 6, *ASSISTANT]
    script.call(shown, [60, END_OF_TURN], after=first, source="continued")
    result = build(script)
    (trace,) = result.traces
    assert whole(trace) == [*shown, 60, END_OF_TURN]
    assert (result.calls.continued, result.calls.forks, result.calls.drift) == (1, 0, 0)


def test_case_003_a_template_that_deletes_earlier_thinking_loses_no_token(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    answer = [20, 21, 22, 23, END_OF_TURN]
    first = script.call([START, 5], [*THINK, *answer])
    without = [START, 5, *answer, NEWLINE, 6]
    second = script.call(without, [*THINK, 30, END_OF_TURN], after=first)
    script.call([*without, 30, END_OF_TURN, NEWLINE, 7], [*THINK, 40, END_OF_TURN], after=second)
    result = build(script)
    assert len(result.traces) == 3
    assert sum(trace.trainable for trace in result.traces) == result.tokens.sampled == 3 * 37 + 5 + 2 + 2
    assert result.tokens.excluded == {}
    assert result.calls.forks == 2


def test_case_004_a_tool_call_moved_by_parsing_forks_and_keeps_what_was_sampled(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    text_before, tool_call, text_after = [10], [70, 71, 72], [11, END_OF_TURN]
    first = script.call([START, 5], [*text_before, *tool_call, *text_after], finish="tool_calls")
    replayed = [START, 5, *text_before, 11, *tool_call, END_OF_TURN, NEWLINE, *TOOL, 6]
    script.call(replayed, [12, END_OF_TURN], after=first)
    result = build(script)
    assert [whole(trace) for trace in result.traces] == [
        [START, 5, *text_before, *tool_call, *text_after],
        [*replayed, 12, END_OF_TURN],
    ]
    assert trained(result) == [*text_before, *tool_call, *text_after, 12, END_OF_TURN]
    assert result.calls.forks == 1


def test_case_006_an_end_of_turn_inside_a_body_cuts_nothing(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    body = [10, END_OF_TURN, 11, END_OF_TURN]
    first = script.call([START, 5], body)
    quoting = [NEWLINE, *TOOL, 60, END_OF_TURN, NEWLINE, *ASSISTANT, 61, END_OF_TURN, NEWLINE, *ASSISTANT]
    script.call([START, 5, *body, *quoting], [12, END_OF_TURN], after=first)
    (trace,) = build(script).traces
    assert trace.response_ids.tolist() == [*body, *quoting, 12, END_OF_TURN]
    assert trace.loss_mask.tolist() == [1] * len(body) + [0] * len(quoting) + [1, 1]


def test_case_011_template_scaffold_is_not_trained_and_a_sampled_end_of_turn_is(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([START, *USER, 5, END_OF_TURN, NEWLINE, *ASSISTANT], [10, END_OF_TURN])
    scaffold = [NEWLINE, *USER, 6, END_OF_TURN, NEWLINE, *ASSISTANT]
    before = [START, *USER, 5, END_OF_TURN, NEWLINE, *ASSISTANT, 10, END_OF_TURN]
    script.call([*before, *scaffold], [11, END_OF_TURN], after=first)
    (trace,) = build(script).traces
    assert trace.response_ids.tolist() == [10, END_OF_TURN, *scaffold, 11, END_OF_TURN]
    assert trace.loss_mask.tolist() == [1, 1, *[0] * len(scaffold), 1, 1]


@pytest.mark.parametrize("end", [151645, 128001, 128008, 128009])
def test_case_012_whatever_id_ends_an_answer_it_is_trained(tmp_path: Path, end: int) -> None:
    script = ScriptedLog(tmp_path)
    script.call([START, 5], [10, end], finish="stop")
    (trace,) = build(script).traces
    assert trace.finish_reason == "stop"
    assert trace.response_ids.tolist() == [10, end]
    assert trace.loss_mask.tolist() == [1, 1]


def test_case_012_no_end_is_invented_for_an_answer_cut_by_length(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([START, 5], [10, 11], finish="length")
    (trace,) = build(script).traces
    assert trace.finish_reason == "length"
    assert trace.response_ids.tolist() == [10, 11]


def test_case_016_the_logprob_in_the_trace_is_the_one_recorded_for_the_sampled_token(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([START], [10, 11], logprobs=[-2.3, -0.1])
    script.call([START, 10, 11, 5], [12], after=first, logprobs=[-7.25])
    (trace,) = build(script).traces
    np.testing.assert_array_equal(trace.response_logprobs, np.asarray([-2.3, -0.1, 0.0, -7.25], np.float32))


@pytest.mark.parametrize("strategy", BUILDERS)
@pytest.mark.parametrize("bad", [float("nan"), float("-inf"), float("inf"), None, -9999, "all of them", "none at all"])
def test_case_017_a_logprob_that_is_none_is_never_a_number(tmp_path: Path, strategy: str, bad: float | str) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([START], [10, 11, 12, 13, 14])
    logprobs = [-0.1, -0.2, bad, -0.3, -0.4]
    if bad == "all of them":
        logprobs = [-0.1, float("nan"), float("-inf"), None, -9999]
    second = script.call(
        [START, 10, 11, 12, 13, 14, 5],
        [20, 21, 22, 23, 24],
        after=first,
        logprobs=None if bad == "none at all" else logprobs,
    )
    script.call([START, 10, 11, 12, 13, 14, 5, 20, 21, 22, 23, 24, 6], [30], after=second)
    result = build(script, strategy)
    assert result.calls.missing_logprobs == 1
    assert result.tokens.trainable == result.tokens.sampled == 11
    refused = [trace for trace in result.traces if trace.response_logprobs is None]
    assert [trace.metadata["calls"][-1] for trace in refused] == [second]
    assert refused[0].loss_mask[-5:].tolist() == [1] * 5
    kept = [trace for trace in result.traces if trace.response_logprobs is not None]
    assert all(np.isfinite(trace.response_logprobs).all() for trace in kept)


def test_case_023_a_retry_that_joined_is_one_call_in_one_chain(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([START, 5], [10, END_OF_TURN], joined=1)
    script.call([START, 5, 10, END_OF_TURN, NEWLINE, 6], [11, END_OF_TURN], after=first, source="continued")
    result = build(script)
    (trace,) = result.traces
    assert trace.metadata["calls"] == [1, 2]
    assert (result.calls.completions, result.calls.joined) == (2, 1)


def test_case_023_an_undelivered_answer_is_excluded_and_the_delivered_one_goes_on(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([START, 5], [10, END_OF_TURN], delivered=False)
    second = script.call([START, 5], [20, END_OF_TURN])
    later = [START, 5, 20, END_OF_TURN, NEWLINE, 6]
    third = script.call(later, [21, END_OF_TURN], after=second)
    script.call([*later, 21, END_OF_TURN, NEWLINE, 7], [22, END_OF_TURN], after=third)
    result = build(script)
    (trace,) = result.traces
    assert trace.metadata["calls"] == [2, 3, 4]
    assert trained(result) == [20, END_OF_TURN, 21, END_OF_TURN, 22, END_OF_TURN]
    assert result.tokens.excluded == {"undelivered": 2}


def test_case_023_an_equal_call_after_a_delivered_one_is_a_new_sample(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([START, 5], [10, END_OF_TURN])
    second = script.call([START, 5], [20, END_OF_TURN])
    script.call([START, 5, 20, END_OF_TURN, NEWLINE, 6], [21, END_OF_TURN], after=second)
    result = build(script)
    assert [trace.metadata["calls"] for trace in result.traces] == [[1], [2, 3]]
    assert result.tokens.excluded == {}


def test_case_023_of_two_equal_answers_only_the_delivered_one_is_trained(tmp_path: Path) -> None:
    """At temperature 0 the retry samples the same ids again."""
    script = ScriptedLog(tmp_path)
    script.call([START, 5], [10, END_OF_TURN], delivered=False)
    second = script.call([START, 5], [10, END_OF_TURN])
    script.call([START, 5, 10, END_OF_TURN, NEWLINE, 6], [21, END_OF_TURN], after=second)
    result = build(script)
    assert [trace.metadata["calls"] for trace in result.traces] == [[2, 3]]
    assert result.tokens.excluded == {"undelivered": 2}


def conversation(script: ScriptedLog, turns: int, cut_by_length: int | None = None) -> list[int]:
    """A chain of turns of two sampled ids; returns the prompt of the turn that would come next."""
    prompt, before = [START, 5], None
    for turn in range(1, turns + 1):
        sampled = [100 + turn, END_OF_TURN]
        finish = "length" if turn == cut_by_length else "stop"
        before = script.call(prompt, sampled, after=before, source="continued" if before else "rendered", finish=finish)
        prompt = [*prompt, *sampled, NEWLINE, 6]
    return prompt


def test_case_032_a_turn_cut_by_length_is_kept_and_the_session_goes_on(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    conversation(script, turns=7, cut_by_length=5)
    result = build(script)
    (trace,) = result.traces
    assert trace.metadata["calls"] == [1, 2, 3, 4, 5, 6, 7]
    assert trace.finish_reason == "stop"
    assert 105 in trained(result)


def test_case_047_a_session_killed_in_turn_41_keeps_its_40_turns(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    prompt = conversation(script, turns=40)
    script.call(prompt, [141], after=40, source="continued", finish=None, delivered=False)
    result = build(script)
    (trace,) = result.traces
    assert trace.metadata["calls"] == list(range(1, 41))
    assert result.tokens.trainable == 80
    assert result.tokens.excluded == {"aborted": 1}
    assert result.calls.completions == 41


def test_case_059_a_trajectory_of_many_traces_trains_each_of_its_tokens_once(tmp_path: Path) -> None:
    """What weighting stands on: every trace has trainable tokens, and none counts twice."""
    (tmp_path / "one").mkdir()
    single = ScriptedLog(tmp_path / "one")
    single.call([START, 5], [10, END_OF_TURN])
    assert len(build(single).traces) == 1
    script = ScriptedLog(tmp_path)
    before = None
    for compaction in range(7):
        before = script.call([START, 5, 300 + compaction], [10 + compaction, END_OF_TURN], after=before)
    result = build(script)
    assert [trace.trainable for trace in result.traces] == [2] * 7
    assert result.tokens.trainable == result.tokens.sampled == 14
