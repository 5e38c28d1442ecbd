"""The builders' rules one by one, on small logs."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import msgspec
import numpy as np
import pytest

from peers.session_logs import ScriptedLog, header
from polar.errors import BuildFault, TaskFault
from polar.records import BuildResult, CallCounts, TokenLedger
from polar.requests import StrategySpec
from polar.sessionlog import Chunk, Delivered, Finished, LogWriter, Opened, Prompt, SessionLog, read
from polar.trajectory import BUILDERS, load_builder
from polar.trajectory.prefix_merging import PrefixMerging


def merge(log: SessionLog, include_auxiliary: bool = False) -> BuildResult:
    return load_builder(StrategySpec()).build(log, include_auxiliary=include_auxiliary)


def calls(result: BuildResult) -> list[list[int]]:
    return [trace.metadata["calls"] for trace in result.traces]


def test_builders_are_found_by_name_or_path() -> None:
    assert {name: type(load_builder(StrategySpec(strategy=name))).__name__ for name in BUILDERS} == {
        "prefix_merging": "PrefixMerging",
        "per_request": "PerRequest",
    }
    assert isinstance(
        load_builder(StrategySpec(strategy="polar.trajectory.prefix_merging:PrefixMerging")), PrefixMerging
    )
    with pytest.raises(TaskFault, match="unknown builder 'merge': known are per_request, prefix_merging"):
        load_builder(StrategySpec(strategy="merge"))


def test_two_turns_are_one_trace(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1, 2], [10, 11, 9], version="3")
    script.call([1, 2, 10, 11, 9, 198, 7], [20, 9], after=first, source="continued", version="4")
    (trace,) = merge(script.read()).traces
    assert trace.prompt_ids.tolist() == [1, 2]
    assert trace.response_ids.tolist() == [10, 11, 9, 198, 7, 20, 9]
    assert trace.loss_mask.tolist() == [1, 1, 1, 0, 0, 1, 1]
    assert trace.response_logprobs is not None
    assert trace.response_logprobs.tolist() == [-0.5, -0.75, -1.0, 0.0, 0.0, -0.5, -0.75]
    assert trace.weight_versions == [(0, 3, "3"), (5, 7, "4")]
    assert trace.metadata == {"calls": [1, 2], "turns": [[0, 3, 1], [5, 7, 2]]}
    assert [message["content"] for message in trace.prompt_messages] == ["for call 1"]
    assert [message["content"] for message in trace.response_messages] == ["answer 1", "for call 2", "answer 2"]


def test_of_siblings_the_first_extends_and_the_shared_part_is_trained_once(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    root = script.call([1], [10, 9])
    for answer in (20, 30, 40):
        script.call([1, 10, 9, 198], [answer], after=root)
    result = merge(script.read())
    assert calls(result) == [[1, 2], [3], [4]]
    assert [trace.prompt_ids.tolist() for trace in result.traces] == [[1], [1, 10, 9, 198], [1, 10, 9, 198]]
    assert result.tokens == TokenLedger(sampled=5, trainable=5)


def test_compaction_starts_a_trace_with_its_whole_prompt(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1, 2], [10, 9])
    second = script.call([1, 2, 10, 9, 3], [11, 9], after=first)
    third = script.call([1, 2, 77], [12, 9], after=second)
    script.call([1, 2, 77, 12, 9, 4], [13], after=third)
    result = merge(script.read())
    assert calls(result) == [[1, 2], [3, 4]]
    assert result.traces[1].prompt_ids.tolist() == [1, 2, 77]
    assert (result.calls.forks, result.calls.drift) == (1, 0)
    assert (result.calls.prompt_tokens, result.calls.prefilled_again) == (2 + 5 + 3 + 6, 1)


def test_an_excluded_call_is_context_where_a_later_prompt_has_it(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1], [10])
    beyond = script.call([1, 10, 2], [11], after=first, over_limit=True)
    script.call([1, 10, 2, 11, 3], [12], after=beyond)
    result = merge(script.read())
    (trace,) = result.traces
    assert trace.response_ids.tolist() == [10, 2, 11, 3, 12]
    assert trace.loss_mask.tolist() == [1, 0, 0, 0, 1]
    assert result.tokens == TokenLedger(sampled=3, trainable=2, excluded={"over_limit": 1})


def test_auxiliary_calls_are_trained_only_when_asked_for(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1], [10, 11])
    script.call([5], [12], auxiliary=True)
    log = script.read()
    assert merge(log).tokens == TokenLedger(sampled=3, trainable=2, excluded={"auxiliary_call": 1})
    assert merge(log, include_auxiliary=True).tokens == TokenLedger(sampled=3, trainable=3)


@pytest.mark.parametrize("finish", [None, "abort", "error"])
def test_a_call_that_was_cut_off_is_trained_where_the_harness_went_on_from_it(
    tmp_path: Path, finish: str | None
) -> None:
    script = ScriptedLog(tmp_path)
    cut = script.call([1], [10, 11], finish=finish, delivered=False)
    script.call([1, 10, 11, 2], [12], after=cut)
    script.call([6], [13], finish=finish, delivered=True)
    result = merge(script.read())
    assert calls(result) == [[1, 2]]
    assert result.tokens.excluded == {"aborted": 1}


def test_an_equal_prompt_is_no_continuation(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1, 2], [10, 9], delivered=False)
    script.call([1, 2], [11, 9])
    result = merge(script.read())
    assert calls(result) == [[2]]
    assert result.tokens.excluded == {"undelivered": 2}


def test_a_missing_logprob_ends_the_chain(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1], [10])
    second = script.call([1, 10, 2], [11], after=first, logprobs=None)
    script.call([1, 10, 2, 11, 3], [12], after=second)
    result = merge(script.read())
    assert calls(result) == [[1, 2], [3]]
    assert result.traces[0].response_logprobs is None
    assert result.traces[0].loss_mask.tolist() == [1, 0, 1]
    assert result.traces[1].prompt_ids.tolist() == [1, 10, 2, 11, 3]
    assert result.calls.missing_logprobs == 1


def test_empty_answers_make_no_trace_and_break_no_chain(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1], [10])
    empty = script.call([1, 10, 2], [], after=first, logprobs=None)
    script.call([1, 10, 2, 3], [11], after=empty)
    result = merge(script.read())
    assert calls(result) == [[1, 3]]
    assert (result.calls.completions, result.calls.missing_logprobs, result.calls.forks) == (3, 0, 0)


def write(folder: Path, prompts: list[tuple[int | None, int, list[int]]], sampled: list[list[int]]) -> SessionLog:
    """A log whose prompts are stored just so, as (base, keep, new ids)."""
    writer = LogWriter(folder / "just_so.log", header())
    for number, ((base, keep, new), ids) in enumerate(zip(prompts, sampled, strict=True), start=1):
        writer.append(Opened(call=number, at=0.0, dialect="openai_chat", body=b"", model="policy"))
        writer.append(Prompt(call=number, base=base, keep=keep, ids=np.asarray(new), source="rendered"))
        logprobs = np.full(len(ids), -1.0)
        writer.append(Chunk(call=number, ids=np.asarray(ids), logprobs=logprobs))
        writer.append(Finished(call=number, at=0.0, finish_reason="stop"))
        writer.append(Delivered(call=number, at=0.0))
    return read(writer.path)


@pytest.mark.parametrize(
    "third",
    [
        pytest.param((2, 5, [4]), id="all of the call before"),
        pytest.param((None, 0, [1, 10, 2, 11, 9, 4]), id="nothing named as kept"),
        pytest.param((2, 2, [2, 11, 9, 4]), id="up to the end of the call before that"),
        pytest.param((2, 4, [9, 4]), id="up to the middle of an answer"),
        pytest.param((1, 1, [10, 2, 11, 9, 4]), id="the first prompt only"),
    ],
)
def test_the_ids_decide_whatever_the_log_names_as_kept(
    tmp_path: Path, third: tuple[int | None, int, list[int]]
) -> None:
    log = write(tmp_path, [(None, 0, [1]), (1, 2, [2]), third], [[10], [11, 9], [12]])
    (trace,) = merge(log).traces
    assert trace.metadata["calls"] == [1, 2, 3]
    assert trace.response_ids.tolist() == [10, 2, 11, 9, 4, 12]
    assert trace.loss_mask.tolist() == [1, 0, 1, 1, 0, 1]


def test_a_prompt_that_ends_inside_an_ancestor_goes_on_from_the_call_that_ends_there(tmp_path: Path) -> None:
    log = write(tmp_path, [(None, 0, [1]), (1, 2, [2]), (2, 4, [3]), (3, 2, [7])], [[10], [11], [12], [13]])
    result = merge(log)
    assert calls(result) == [[1, 2, 3], [4]]
    assert result.traces[1].prompt_ids.tolist() == [1, 10, 7]
    assert log.prompt_ids(log.call(4)).tolist() == [1, 10, 7]


@pytest.mark.parametrize("prompt", [(1, 3, [2]), (None, 2, [2]), (1, -1, [2])])
def test_a_prompt_that_stands_on_nothing_is_a_build_fault(tmp_path: Path, prompt: tuple[int | None, int, list[int]]):
    log = write(tmp_path, [(None, 0, [1]), prompt], [[10], [11]])
    with pytest.raises(BuildFault, match="session s1: call 2 keeps"):
        merge(log)


def test_of_equal_answers_the_one_that_is_known_to_be_continued_counts(tmp_path: Path) -> None:
    def continuing(name: str, after: int | None, delivered: tuple[bool, bool, bool]) -> BuildResult:
        (tmp_path / name).mkdir()
        script = ScriptedLog(tmp_path / name)
        for arrived in delivered:
            script.call([1], [10, 9], delivered=arrived)
        script.call([1, 10, 9, 2], [11], after=after)
        return merge(script.read())

    expected = continuing("expected", 1, (False, True, False))
    assert calls(expected) == [[1, 4], [2]]
    assert expected.tokens.excluded == {"undelivered": 2}
    delivered = continuing("delivered", None, (False, True, False))
    assert calls(delivered) == [[2, 4]]
    assert delivered.tokens.excluded == {"undelivered": 4}
    assert calls(continuing("latest", None, (True, True, True))) == [[1], [2], [3, 4]]


def test_what_the_messages_continue_goes_before_what_the_ids_were_taken_from(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "two.log", header())
    for number in (1, 2):
        writer.append(Opened(call=number, at=0.0, dialect="openai_chat", body=b"", model="policy"))
        writer.append(Prompt(call=number, ids=np.asarray([1]), source="rendered"))
        writer.append(Chunk(call=number, ids=np.asarray([10]), logprobs=np.asarray([-1.0])))
    writer.append(Opened(call=3, at=0.0, dialect="openai_chat", body=b"", model="policy"))
    writer.append(Prompt(call=3, base=2, keep=2, ids=np.asarray([5]), source="continued", expected=1))
    assert merge(read(writer.path)).tokens == TokenLedger(sampled=2, trainable=1, excluded={"aborted": 1})
    assert calls(merge(read(writer.path))) == [[1]]


def test_an_engine_without_ids_gives_no_traces_but_is_counted(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "no_ids.log", header())
    for number in (1, 2):
        writer.append(Opened(call=number, at=0.0, dialect="openai_chat", body=b"", model="policy"))
        writer.append(Finished(call=number, at=1.0, finish_reason="stop", message={"role": "assistant"}))
    writer.append(Opened(call=3, at=0.0, dialect="openai_chat", body=b"", model="policy"))
    writer.append(Finished(call=3, at=1.0, finish_reason="error", fault="engine_down"))
    for strategy in BUILDERS:
        result = load_builder(StrategySpec(strategy=strategy)).build(read(writer.path))
        counts = CallCounts(completions=2, without_ids=2)
        assert result == BuildResult(traces=[], tokens=TokenLedger(), calls=counts)


def test_an_answer_whose_prompt_the_engine_never_told_is_excluded_by_name(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "no_prompt.log", header())
    writer.append(Opened(call=1, at=0.0, dialect="openai_chat", body=b"", model="policy"))
    writer.append(Chunk(call=1, ids=np.asarray([10, 9]), logprobs=np.asarray([-1.0, -1.0])))
    writer.append(Finished(call=1, at=1.0, finish_reason="stop"))
    writer.append(Delivered(call=1, at=1.0))
    assert merge(read(writer.path)).tokens == TokenLedger(sampled=2, excluded={"unknown_context": 2})


def test_per_request_gives_every_call_its_own_context(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1], [10], logprobs=[float("nan")])
    script.call([1, 10, 2], [11], after=first)
    result = load_builder(StrategySpec(strategy="per_request")).build(script.read())
    assert [trace.prompt_ids.tolist() for trace in result.traces] == [[1], [1, 10, 2]]
    assert [trace.response_ids.tolist() for trace in result.traces] == [[10], [11]]
    assert [trace.response_logprobs is None for trace in result.traces] == [True, False]
    assert [message["content"] for message in result.traces[1].prompt_messages] == [
        "for call 1",
        "answer 1",
        "for call 2",
    ]


def long_session(folder: Path, turns: int, per_turn: int) -> SessionLog:
    """A chain in which every turn adds `per_turn` ids of context and as many sampled ones."""
    folder.mkdir()
    writer = LogWriter(folder / "long.log", header())
    ids = np.arange(per_turn)
    for number in range(1, turns + 1):
        base = number - 1 or None
        writer.append(Opened(call=number, at=0.0, dialect="openai_chat", body=b"", model="policy"))
        keep = 2 * per_turn * (number - 1)
        writer.append(Prompt(call=number, base=base, keep=keep, ids=ids, source="continued", expected=base))
        writer.append(Chunk(call=number, ids=ids, logprobs=np.full(per_turn, -1.0), version="1"))
        writer.append(Delivered(call=number, at=0.0))
        writer.append(Finished(call=number, at=0.0, finish_reason="stop"))
    return read(writer.path)


@pytest.mark.parametrize(("strategy", "bytes_a_token"), [("prefix_merging", 24), ("per_request", 24)])
def test_memory_is_a_few_bytes_a_token_however_many_turns(tmp_path: Path, strategy: str, bytes_a_token: int) -> None:
    log = long_session(tmp_path / strategy, turns=100, per_turn=2000)
    builder = load_builder(StrategySpec(strategy=strategy))
    builder.build(log)
    tracemalloc.start()
    result = builder.build(log)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    tokens = 2 * 100 * 2000
    assert result.tokens.sampled == tokens // 2
    assert peak < bytes_a_token * tokens


class Counting(np.ndarray):
    """An array that counts how many ids are compared and copied through it."""

    touched = 0

    def __array_function__(self, function, types, args, kwargs):
        parts = args[0] if function is np.concatenate else args
        Counting.touched += sum(part.size for part in parts if isinstance(part, np.ndarray))
        plain = [part.view(np.ndarray) if isinstance(part, np.ndarray) else part for part in parts]
        return function(plain, *args[1:]).view(Counting) if function is np.concatenate else function(*plain, **kwargs)

    def __array_ufunc__(self, ufunc, method, *inputs, **kwargs):
        Counting.touched += sum(part.size for part in inputs if isinstance(part, np.ndarray))
        plain = [part.view(np.ndarray) if isinstance(part, np.ndarray) else part for part in inputs]
        return getattr(ufunc, method)(*plain, **kwargs)


def ids_touched(log: SessionLog) -> int:
    for call in log.calls:
        call.ids = call.ids.view(Counting)
        assert call.prompt is not None
        call.prompt.ids = call.prompt.ids.view(Counting)
    Counting.touched = 0
    merge(log)
    return Counting.touched


def test_merging_touches_each_id_a_fixed_number_of_times(tmp_path: Path) -> None:
    few = ids_touched(long_session(tmp_path / "few", turns=20, per_turn=50))
    many = ids_touched(long_session(tmp_path / "many", turns=200, per_turn=50))
    assert few > 2 * 20 * 50
    assert many == pytest.approx(10 * few, rel=0.05)


def test_results_hold_no_writable_array_that_traces_share(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1], [10])
    (trace,) = merge(script.read()).traces
    with pytest.raises(ValueError, match="read-only"):
        trace.response_ids[0] = 5
    assert msgspec.structs.asdict(trace)["reward"] is None
