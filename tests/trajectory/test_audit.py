"""The audit refuses every result that breaks a law, whoever built it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest

from peers.session_logs import ScriptedLog
from polar.codec import from_msgpack, to_msgpack
from polar.errors import BuildFault
from polar.records import BuildResult, TokenLedger
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog
from polar.trajectory import load_builder
from polar.trajectory.audit import audit


@pytest.fixture
def log(tmp_path: Path) -> SessionLog:
    script = ScriptedLog(tmp_path)
    first = script.call([1, 2], [10, 11], version="3")
    script.call([1, 2, 10, 11, 5, 6], [12, 13], after=first)
    script.call([1, 2, 10, 11, 7], [14, 15], after=first, delivered=False)
    script.call([1, 2, 10, 11, 8], [16], after=first)
    return script.read()


@pytest.fixture
def result(log: SessionLog) -> BuildResult:
    """Two traces, [1, 2] and [4], with arrays that may be spoiled."""
    return from_msgpack(to_msgpack(load_builder(StrategySpec()).build(log)), BuildResult)


def test_what_a_builder_made_passes(log: SessionLog, result: BuildResult) -> None:
    audit(log, result)


def with_id(ids: np.ndarray, index: int, value: int) -> np.ndarray:
    changed = ids.copy()
    changed[index] = value
    return changed


def other_prompt_id(result: BuildResult) -> None:
    result.traces[0].prompt_ids = with_id(result.traces[0].prompt_ids, 0, 99)


def other_id_between_turns(result: BuildResult) -> None:
    result.traces[0].response_ids = with_id(result.traces[0].response_ids, 2, 99)


def other_sampled_id(result: BuildResult) -> None:
    result.traces[0].response_ids = with_id(result.traces[0].response_ids, 4, 99)


def other_id_in_a_shared_prompt(result: BuildResult) -> None:
    result.traces[1].prompt_ids = with_id(result.traces[1].prompt_ids, 2, 99)


def shorter_prompt(result: BuildResult) -> None:
    result.traces[1].prompt_ids = result.traces[1].prompt_ids[1:]


def context_trained(result: BuildResult) -> None:
    result.traces[0].loss_mask = with_id(result.traces[0].loss_mask, 2, 1)


def sampled_token_not_trained(result: BuildResult) -> None:
    result.traces[0].loss_mask = with_id(result.traces[0].loss_mask, 0, 0)


def mask_too_short(result: BuildResult) -> None:
    result.traces[0].loss_mask = result.traces[0].loss_mask[:-1]


def logprobs_too_short(result: BuildResult) -> None:
    result.traces[0].response_logprobs = result.traces[0].response_logprobs[:-1]


def other_logprob(result: BuildResult) -> None:
    result.traces[0].response_logprobs = result.traces[0].response_logprobs * 0.5


def logprob_on_context(result: BuildResult) -> None:
    logprobs = result.traces[0].response_logprobs.copy()
    logprobs[2] = -1.0
    result.traces[0].response_logprobs = logprobs


def logprobs_dropped(result: BuildResult) -> None:
    result.traces[0].response_logprobs = None


def version_of_other_tokens(result: BuildResult) -> None:
    result.traces[0].weight_versions[0] = (0, 4, "3")


def trained_twice(result: BuildResult) -> None:
    result.traces.append(result.traces[1])


def trace_lost(result: BuildResult) -> None:
    del result.traces[1]


def trace_lost_and_forgotten(result: BuildResult) -> None:
    del result.traces[1]
    result.tokens = msgspec.structs.replace(result.tokens, sampled=6, trainable=4)


def trace_lost_in_the_ledger(result: BuildResult) -> None:
    del result.traces[1]
    result.tokens = msgspec.structs.replace(result.tokens, trainable=4)


def excluded_without_a_reason(result: BuildResult) -> None:
    result.tokens = TokenLedger(sampled=result.tokens.sampled, trainable=result.tokens.trainable)


def unknown_call(result: BuildResult) -> None:
    result.traces[1].metadata["turns"][0][2] = 17


def turn_outside(result: BuildResult) -> None:
    result.traces[1].metadata["turns"][0][1] = 17


def no_turns(result: BuildResult) -> None:
    del result.traces[1].metadata["turns"]


SPOILT = {
    other_prompt_id: "trace 0: the context of call 1",
    other_id_between_turns: "trace 0: the context of call 2",
    other_sampled_id: "trace 0: the turn of call 2 is not what was sampled",
    other_id_in_a_shared_prompt: "trace 1: the context of call 4",
    shorter_prompt: "trace 1: the context of call 4",
    context_trained: "trace 0: the mask",
    sampled_token_not_trained: "trace 0: the mask",
    mask_too_short: "trace 0: the mask",
    logprobs_too_short: "trace 0: logprobs",
    other_logprob: "trace 0: logprobs",
    logprob_on_context: "trace 0: logprobs",
    logprobs_dropped: "trace 0: logprobs",
    version_of_other_tokens: "trace 0: version spans",
    trained_twice: "trace 2: call 4 is trainable twice",
    trace_lost: "the ledger has",
    trace_lost_and_forgotten: "the ledger has 6 sampled and 4 trainable, the log 7 and the traces 4",
    trace_lost_in_the_ledger: "does not hold",
    excluded_without_a_reason: "does not hold",
    unknown_call: "call 17 is not in the log",
    turn_outside: r"turn \[0, 17\)",
    no_turns: "trace 1: no turn is named",
}


@pytest.mark.parametrize("spoil", SPOILT, ids=lambda spoil: spoil.__name__)
def test_the_audit_names_what_is_wrong(
    log: SessionLog, result: BuildResult, spoil: Callable[[BuildResult], None]
) -> None:
    spoil(result)
    with pytest.raises(BuildFault, match=f"session s1.*{SPOILT[spoil]}"):
        audit(log, result)


def test_logprobs_invented_for_missing_ones_are_refused(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1], [10, 11], logprobs=[-0.1, float("nan")])
    log = script.read()
    result = load_builder(StrategySpec()).build(log)
    result.traces[0].response_logprobs = np.asarray([-0.1, 0.0], np.float32)
    with pytest.raises(BuildFault, match="although some are missing"):
        audit(log, result)


def test_the_same_ids_out_of_another_context_are_refused(tmp_path: Path) -> None:
    """Drift: the engine had 77 where the first answer was 50, 51; together they would be a context nobody saw."""
    script = ScriptedLog(tmp_path)
    first = script.call([1], [50, 51])
    script.call([1, 77, 2], [60], after=first, source="engine")
    log = script.read()
    result = load_builder(StrategySpec()).build(log)
    joined = result.traces[0]
    joined.response_ids = np.asarray([50, 51, 2, 60], np.int32)
    joined.loss_mask = np.asarray([1, 1, 0, 1], np.uint8)
    joined.response_logprobs = np.asarray([-0.5, -0.75, 0.0, -0.5], np.float32)
    joined.weight_versions = [(0, 2, "1"), (3, 4, "1")]
    joined.metadata = {"calls": [1, 2], "turns": [[0, 2, 1], [3, 4, 2]]}
    with pytest.raises(BuildFault, match="trace 0: the context of call 2 is not the one that the engine had"):
        audit(log, BuildResult(traces=[joined], tokens=result.tokens, calls=result.calls))


@pytest.mark.parametrize("position", range(8))
def test_every_id_of_a_prompt_is_checked_also_where_an_earlier_trace_had_it(tmp_path: Path, position: int) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1, 2], [10, 11])
    second = script.call([1, 2, 10, 11, 5], [12, 13], after=first)
    script.call([1, 2, 10, 11, 5, 12, 13, 6], [14], after=second)
    log = script.read()
    result = load_builder(StrategySpec(strategy="per_request")).build(log)
    audit(log, result)
    result.traces[2].prompt_ids = with_id(result.traces[2].prompt_ids, position, 99)
    with pytest.raises(BuildFault, match="trace 2: the context of call 3"):
        audit(log, result)
