"""A chain of calls as one trace: what they sampled has mask 1, what stands between has mask 0 and logprob 0."""

from __future__ import annotations

from typing import Any

import numpy as np

from polar.records import LOGPROBS, MASK, Trace, VersionSpan
from polar.sessionlog import Call, SessionLog
from polar.trajectory.calls import usable_logprobs


def assemble(log: SessionLog, calls: list[Call], sequence: np.ndarray) -> Trace:
    """The trace of `calls`, each of which keeps the one before it; `sequence` starts with the last one's whole sequence
    and is shared, not copied. Metadata: calls [number], turns [[start, end, number]] over response_ids."""
    first, last = calls[0], calls[-1]
    start = first.prompt_length
    response_ids = sequence[start : last.length]
    turns = [[call.prompt_length - start, call.length - start, call.number] for call in calls]
    asked, followed = _messages(log, first, last)
    return Trace(
        prompt_ids=sequence[:start],
        response_ids=response_ids,
        loss_mask=_mask(len(response_ids), turns),
        response_logprobs=_logprobs(log, len(response_ids), calls, turns),
        weight_versions=_versions(calls, turns),
        prompt_messages=asked,
        response_messages=followed,
        tools=log.tools(first),
        finish_reason=last.finished.finish_reason if last.finished else None,
        metadata={"calls": [call.number for call in calls], "turns": turns},
    )


def _mask(length: int, turns: list[list[int]]) -> np.ndarray:
    mask = np.zeros(length, MASK)
    for start, end, _ in turns:
        mask[start:end] = 1
    return mask


def _logprobs(log: SessionLog, length: int, calls: list[Call], turns: list[list[int]]) -> np.ndarray | None:
    if not all(usable_logprobs(log.header, call) for call in calls):
        return None
    logprobs = np.zeros(length, LOGPROBS)
    for call, (start, end, _) in zip(calls, turns, strict=True):
        logprobs[start:end] = call.logprobs
    return logprobs


def _versions(calls: list[Call], turns: list[list[int]]) -> list[VersionSpan]:
    return [
        (turn[0] + start, turn[0] + end, version)
        for call, turn in zip(calls, turns, strict=True)
        for start, end, version in call.spans
    ]


def _messages(log: SessionLog, first: Call, last: Call) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What the first call was asked, and what follows it up to and with the last call's answer."""
    asked = log.messages(first)
    followed = log.messages(last)[len(asked) :] if last is not first else []
    if last.finished is not None and last.finished.message is not None:
        followed.append(last.finished.message)
    return asked, followed
