"""A session turn by turn, for people: what each call was shown, what it sampled, and what became of that."""

from __future__ import annotations

import msgspec
import numpy as np

from polar.records import LOGPROBS, MASK, BuildResult, VersionSpan
from polar.sessionlog import Call, SessionLog
from polar.trajectory.calls import exclusion
from polar.trajectory.sequences import Sequences


class Fork(msgspec.Struct, kw_only=True, frozen=True):
    """Where a prompt leaves the sequence of an earlier call; an id is None where its side has ended."""

    expected_call: int
    position: int
    expected_id: int | None
    prompt_id: int | None


class Turn(msgspec.Struct, kw_only=True):
    """One call. new_ids: its prompt behind the `kept` ids that it shares with the call it continues (or should have).
    fork: where it leaves that one; leaves: of a call whose messages continue no answer, where it leaves the one that
    begins most like it.
    ids, loss_mask, logprobs: the sampled tokens; a logprob is NaN where there is none. Times are Unix seconds."""

    call: int
    dialect: str
    model: str
    source: str | None
    why: str | None
    continues: int | None
    prompt_length: int
    kept: int
    new_ids: np.ndarray
    ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    versions: list[VersionSpan]
    trace: int | None
    excluded: str | None
    fork: Fork | None
    leaves: Fork | None
    finish_reason: str | None
    delivered: bool
    opened_at: float
    first_token_at: float | None
    finished_at: float | None


def turns(log: SessionLog, result: BuildResult) -> list[Turn]:
    """All calls of the log in order, with their place in `result` (whatever builder made it)."""
    sequences = Sequences(log)
    places = {call: index for index, trace in enumerate(result.traces) for _, _, call in trace.metadata["turns"]}
    continues = {call.number: _continues(sequences, call) for call in log.calls}
    continued = {sequences.continued_by(call) for call in log.calls}
    return [
        _turn(sequences, call, continues[call.number], places.get(call.number), call.number in continued)
        for call in log.calls
    ]


def _continues(sequences: Sequences, call: Call) -> int | None:
    expected = call.prompt.expected if call.prompt else None
    return expected if expected is not None and sequences.knows(expected) else sequences.continued_by(call)


def _turn(sequences: Sequences, call: Call, continues: int | None, trace: int | None, continued: bool) -> Turn:
    opened, prompt, finished = call.opened, call.prompt, call.finished
    kept = sequences.kept(call, continues) if prompt and continues is not None else 0
    new_ids = sequences.prompt(call, kept) if prompt else call.ids[:0]
    reason = exclusion(call, continued=continued) if trace is None and len(call.ids) else None
    return Turn(
        call=call.number,
        dialect=opened.dialect,
        model=opened.model,
        source=prompt.source if prompt else None,
        why=prompt.why if prompt else None,
        continues=continues,
        prompt_length=call.prompt_length,
        kept=kept,
        new_ids=new_ids,
        ids=call.ids,
        loss_mask=np.full(len(call.ids), trace is not None, MASK),
        logprobs=np.full(len(call.ids), np.nan, LOGPROBS) if call.logprobs is None else call.logprobs,
        versions=call.spans,
        trace=trace,
        excluded=reason.value if reason else None,
        fork=_fork(sequences, continues, kept, new_ids) if prompt and continues is not None else None,
        leaves=_leaves(sequences, call) if continues is None else None,
        finish_reason=finished.finish_reason if finished else None,
        delivered=call.delivered,
        opened_at=opened.at,
        first_token_at=finished.first_token_at if finished else None,
        finished_at=finished.at if finished else None,
    )


def _leaves(sequences: Sequences, call: Call) -> Fork | None:
    base = call.prompt.base if call.prompt is not None else None
    if base is None or not sequences.knows(base):
        return None
    kept = sequences.kept(call, base)
    return _fork(sequences, base, kept, sequences.prompt(call, kept))


def _fork(sequences: Sequences, expected: int, kept: int, new_ids: np.ndarray) -> Fork | None:
    rest = sequences.sequence(expected, kept)
    if not len(rest):
        return None
    prompt_id = int(new_ids[0]) if len(new_ids) else None
    return Fork(expected_call=expected, position=kept, expected_id=int(rest[0]), prompt_id=prompt_id)
