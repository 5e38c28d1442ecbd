"""What becomes of a group, told one token at a time and in the words of the contract: the bridge must agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from polar.records import SessionResult, TaskResult, Trace
from slime_bridge.fitting import ConversionRules

ENDINGS = {
    "queue": ("failed", False),
    "sandbox_start": ("failed", False),
    "prepare": ("failed", False),
    "build": ("failed", False),
    "done": ("completed", True),
    "harness_exit": ("completed", True),
    "limit": ("truncated", True),
    "context": ("truncated", True),
    "agent_timeout": ("aborted", False),
    "no_calls": ("failed", False),
    "sandbox_limit": ("completed", True),
    "infrastructure": ("failed", False),
    "evaluation": ("failed", False),
    "cancelled": ("aborted", False),
    "early_stop": ("aborted", False),
}
"""termination: (the sample's status, whether it is trained)"""


@dataclass
class Token:
    id: int
    trained: bool
    logprob: float
    version: str | None


@dataclass
class Sequence:
    prompt: list[int]
    response: list[Token]
    trace_index: int
    reward: float


@dataclass
class Session:
    """`sequences` empty: a placeholder stands for it."""

    status: str
    sequences: list[Sequence]
    completed: bool

    @property
    def trained(self) -> int:
        return sum(token.trained for sequence in self.sequences for token in sequence.response)


class Misaligned(Exception):
    """A trainable token has no logprob."""


def verdict(result: TaskResult, size: int, rules: ConversionRules, min_fraction: float) -> str | list[Session]:
    """The name under which the group is dropped, or its sessions in the order of the source's samples."""
    if result.status != "completed":
        return "failed"
    try:
        sessions = [_session(result, index, rules) for index in range(size)]
    except Misaligned:
        return "logprob_error"
    if not any(session.trained for session in sessions):
        return "zero_trainable"
    good = [session for session in sessions if session.completed and session.trained]
    return "low_complete_fraction" if len(good) / size < min_fraction else sessions


def _session(result: TaskResult, index: int, rules: ConversionRules) -> Session:
    found = [each for each in result.results if each.metadata["session_index"] == index]
    if not found:
        return Session("failed", [], False)
    (session,) = found
    traces = session.trajectory.traces if session.trajectory else []
    status, trained = _ending(session, traces, rules)
    completed = session.status == "COMPLETED"
    if not trained:
        return Session(status, [], completed)
    if any(trace.reward is None or not math.isfinite(trace.reward) for trace in traces):
        return Session("failed", [], completed)
    sequences = [made for number, trace in enumerate(traces) if (made := _sequence(number, trace, rules))]
    return Session(status if sequences else "failed", sequences, completed)


def _ending(session: SessionResult, traces: list[Trace], rules: ConversionRules) -> tuple[str, bool]:
    name = session.metadata["termination"]
    if name == "agent_timeout" and rules.timeout_policy == "truncate":
        return "truncated", True
    status, trained = ENDINGS[name]
    if status == "completed" and traces and traces[-1].finish_reason == "length":
        status = "truncated"
    return status, trained


def _sequence(number: int, trace: Trace, rules: ConversionRules) -> Sequence | None:
    ids, masks = trace.response_ids.tolist(), trace.loss_mask.tolist()
    if not any(masks):
        return None
    given: list[Any] = [None] * len(ids) if trace.response_logprobs is None else trace.response_logprobs.tolist()
    if len(given) != len(ids) or any(each is None or not math.isfinite(each) for each in given):
        raise Misaligned
    versions: list[str | None] = [None] * len(ids)
    for start, end, name in trace.weight_versions:
        versions[start:end] = [name] * (end - start)
    prompt = trace.prompt_ids.tolist()
    tokens = [Token(*each) for each in zip(ids, map(bool, masks), given, versions, strict=True)]
    if rules.max_tokens is not None and len(prompt) + len(tokens) > rules.max_tokens:
        tokens = [] if rules.overlong == "drop" else tokens[: max(0, rules.max_tokens - len(prompt))]
    if not prompt or not any(token.trained for token in tokens):
        return None
    return Sequence(prompt, tokens, number, float(trace.reward or 0.0))
