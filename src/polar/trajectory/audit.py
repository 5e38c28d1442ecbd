"""Laws 1 to 3, checked on a built result against the log's own records, without the builder's reasoning.

Linear in the ids of the traces and the log: each stretch of the log is compared once a trace, and a prompt that was
found true in one trace answers for the stretches below it in the others.
"""

from __future__ import annotations

from typing import Any, NoReturn

import numpy as np

from polar.errors import BuildFault
from polar.records import IDS, LOGPROBS, MASK, BuildResult, Trace
from polar.sessionlog import Call, SessionLog
from polar.trajectory.calls import usable_logprobs


def audit(log: SessionLog, result: BuildResult) -> None:
    """Raises BuildFault when the ledger does not balance, a sampled token is trainable twice or has no place, a
    trainable token's context is not the one that the engine had, or ids, mask, logprobs and versions disagree."""
    trained: set[int] = set()
    true_prompts: dict[int, np.ndarray] = {}
    for index, trace in enumerate(result.traces):
        where = f"session {log.header.session_id}, trace {index}"
        turns = _turns(log, trace, where)
        for _, _, call in turns:
            if call.number in trained:
                _fault(where, f"call {call.number} is trainable twice")
            trained.add(call.number)
        _check_alignment(log, trace, turns, where)
        _check_context(log, trace, turns, true_prompts, where)
    _check_ledger(log, result, trained)


_Turn = tuple[int, int, Call]


def _turns(log: SessionLog, trace: Trace, where: str) -> list[_Turn]:
    """The trace's turns [start, end) over response_ids, with their calls; in order, inside, without overlap."""
    turns: list[_Turn] = []
    for start, end, number in trace.metadata.get("turns", ()):
        if not (turns[-1][1] if turns else 0) <= start < end <= len(trace.response_ids):
            _fault(where, f"turn [{start}, {end}) is empty, out of order or outside the response")
        try:
            turns.append((start, end, log.call(number)))
        except KeyError:
            _fault(where, f"call {number} is not in the log")
    if not turns:
        _fault(where, "no turn is named: nothing says which calls it trains")
    return turns


def _check_alignment(log: SessionLog, trace: Trace, turns: list[_Turn], where: str) -> None:
    mask = np.zeros(len(trace.response_ids), MASK)
    logprobs = np.zeros(len(trace.response_ids), LOGPROBS)
    versions: list[tuple[Any, ...]] = []
    usable = all(usable_logprobs(log.header, call) for _, _, call in turns)
    for start, end, call in turns:
        if not np.array_equal(trace.response_ids[start:end], call.ids):
            _fault(where, f"the turn of call {call.number} is not what was sampled")
        mask[start:end] = 1
        if usable:
            logprobs[start:end] = call.logprobs
        versions += [(start + a, start + b, version) for a, b, version in call.spans]
    if not np.array_equal(trace.loss_mask, mask):
        _fault(where, "the mask is not 1 exactly where tokens were sampled")
    if (trace.response_logprobs is not None) != usable:
        _fault(where, "logprobs are there although some are missing, or the other way round")
    if trace.response_logprobs is not None and not np.array_equal(trace.response_logprobs, logprobs):
        _fault(where, "logprobs are not the recorded ones, or not 0 under the mask")
    if [tuple(span) for span in trace.weight_versions] != versions:
        _fault(where, "version spans are not the recorded ones")


def _check_context(
    log: SessionLog, trace: Trace, turns: list[_Turn], true_prompts: dict[int, np.ndarray], where: str
) -> None:
    known = _Context(log, np.concatenate([trace.prompt_ids, trace.response_ids]), true_prompts)
    for start, _, call in turns:
        position = len(trace.prompt_ids) + start
        if call.prompt is None or call.prompt_length != position or not known.holds(call, position):
            _fault(where, f"the context of call {call.number} is not the one that the engine had")
        if start == 0:
            true_prompts[call.number] = trace.prompt_ids


class _Context:
    """Compares one trace's ids with the sequences of calls, and remembers how far each call's was compared."""

    def __init__(self, log: SessionLog, ids: np.ndarray, true_prompts: dict[int, np.ndarray]) -> None:
        self._log = log
        self._ids = ids
        self._true_prompts = true_prompts
        self._compared: dict[int, int] = {}

    def holds(self, call: Call, length: int) -> bool:
        """Whether the first `length` ids are those of the call's sequence. After a False nothing else may be asked."""
        at = call
        while (done := self._compared.get(at.number, 0)) < length:
            self._compared[at.number] = length
            if at.prompt is None:
                return False
            keep = at.prompt.keep
            own = _own(at, max(0, done - keep), length - keep)
            if not np.array_equal(self._ids[max(done, keep) : max(length, keep)], own):
                return False
            if done >= keep:
                return True
            length = min(length, keep)
            if at.number in self._true_prompts:
                return np.array_equal(self._ids[:length], self._true_prompts[at.number][:length])
            if at.prompt.base is None:
                return False
            at = self._log.call(at.prompt.base)
        return True


def _own(call: Call, start: int, end: int) -> np.ndarray:
    """Positions [start, end) of the ids that the call added: its prompt's new ids and the sampled ones."""
    assert call.prompt is not None, "asked only of calls with a prompt"
    if end <= start:
        return np.empty(0, IDS)
    new = len(call.prompt.ids)
    return np.concatenate([call.prompt.ids[start:end], call.ids[max(0, start - new) : max(0, end - new)]])


def _check_ledger(log: SessionLog, result: BuildResult, trained: set[int]) -> None:
    tokens, where = result.tokens, f"session {log.header.session_id}"
    sampled = sum(len(call.ids) for call in log.calls)
    trainable = sum(trace.trainable for trace in result.traces)
    if (tokens.sampled, tokens.trainable) != (sampled, trainable):
        counted = f"{tokens.sampled} sampled and {tokens.trainable} trainable"
        _fault(where, f"the ledger has {counted}, the log {sampled} and the traces {trainable}")
    left = sum(len(call.ids) for call in log.calls if call.number not in trained)
    if not tokens.balanced or sum(tokens.excluded.values()) != left:
        _fault(where, f"sampled = trainable + excluded does not hold: {tokens}; {left} tokens are in no trace")


def _fault(where: str, what: str) -> NoReturn:
    raise BuildFault(f"{where}: {what}")
