"""What of a trace can be trained: all of it, its exact causal prefix, or nothing; what is left out has a name.

Pure. A trace whose trainable tokens have no aligned, finite logprob is refused, never repaired.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from polar.records import Trace, VersionSpan


class RolloutLogprobError(ValueError):
    """A trainable token has no aligned, finite logprob: the group is refused, nothing is made up."""


class Unused(StrEnum):
    """Why trainable tokens of an accepted group are not trained."""

    MASKED_SESSION = "masked_session"
    """the session's ending is not trained, or its reward is no finite number"""
    OVERLONG = "overlong"
    """beyond the cap on a trace's length"""
    EMPTY = "empty"
    """a trace without a prompt, which has no first logit"""


@dataclass(frozen=True)
class ConversionRules:
    """`reward_keys`: a reward is a dict with them (none: a float). `max_tokens`: the cap on a trace; None = none."""

    reward_keys: tuple[str, ...] = ()
    timeout_policy: str = "mask"
    overlong: str = "drop"
    max_tokens: int | None = None

    def reward(self, value: float) -> float | dict[str, float]:
        """As Slime's Sample holds it."""
        return dict.fromkeys(self.reward_keys, value) if self.reward_keys else value


@dataclass(frozen=True)
class FittedTrace:
    index: int
    """its place in the trajectory"""
    trace: Trace
    trainable: int
    spans: list[VersionSpan]
    """those with a trainable token"""


@dataclass
class Fitted:
    """The usable traces of a session. arrived tokens = Σ trainable + Σ unused."""

    traces: list[FittedTrace] = field(default_factory=list)
    unused: Counter[str] = field(default_factory=Counter)
    """trainable tokens, by name"""
    dropped: Counter[str] = field(default_factory=Counter)
    """traces, by name; one without a trainable token is `empty` too"""
    clipped: int = 0

    def leave(self, why: Unused, tokens: int) -> None:
        if tokens:
            self.unused[why.value] += tokens

    @property
    def trainable(self) -> int:
        return sum(each.trainable for each in self.traces)


def fit(traces: Sequence[Trace], rules: ConversionRules) -> Fitted:
    """Raises RolloutLogprobError."""
    fitted = Fitted()
    for index, trace in enumerate(traces):
        _fit(index, trace, rules, fitted)
    return fitted


def _fit(index: int, trace: Trace, rules: ConversionRules, fitted: Fitted) -> None:
    before = _checked(trace)
    if before == 0 or len(trace.prompt_ids) == 0:
        fitted.dropped[Unused.EMPTY.value] += 1
        fitted.leave(Unused.EMPTY, before)
        return
    kept = _within(trace, rules)
    trainable = before if kept is trace else int(np.count_nonzero(kept.loss_mask))
    fitted.leave(Unused.OVERLONG, before - trainable)
    if trainable == 0:
        fitted.dropped[Unused.OVERLONG.value] += 1
        return
    fitted.clipped += kept is not trace
    spans = [span for span in kept.weight_versions if kept.loss_mask[span[0] : span[1]].any()]
    fitted.traces.append(FittedTrace(index, kept, trainable, spans))


def _checked(trace: Trace) -> int:
    """Trainable tokens, each with its logprob."""
    length = len(trace.response_ids)
    if len(trace.loss_mask) != length:
        raise RolloutLogprobError(f"a mask of {len(trace.loss_mask)} for {length} tokens")
    trainable = int(np.count_nonzero(trace.loss_mask))
    if trainable == 0:
        return 0
    if trace.loss_mask.max() > 1:
        raise RolloutLogprobError(f"a mask with a {trace.loss_mask.max()}")
    logprobs = trace.response_logprobs
    if logprobs is None:
        raise RolloutLogprobError(f"{trainable} trainable tokens without logprobs")
    if len(logprobs) != length:
        raise RolloutLogprobError(f"{len(logprobs)} logprobs for {length} tokens")
    if not np.isfinite(logprobs).all():
        raise RolloutLogprobError("a logprob is not finite")
    return trainable


def _within(trace: Trace, rules: ConversionRules) -> Trace:
    """The trace itself where it is within the cap, else what is kept of it."""
    prompt, total = len(trace.prompt_ids), len(trace.prompt_ids) + len(trace.response_ids)
    if rules.max_tokens is None or total <= rules.max_tokens:
        return trace
    return _clipped(trace, 0 if rules.overlong == "drop" else max(0, rules.max_tokens - prompt))


def _clipped(trace: Trace, keep: int) -> Trace:
    """The exact causal prefix of `keep` response tokens."""
    assert trace.response_logprobs is not None
    clipped = copy.copy(trace)
    clipped.response_ids, clipped.loss_mask = trace.response_ids[:keep], trace.loss_mask[:keep]
    clipped.response_logprobs = trace.response_logprobs[:keep]
    spans = trace.weight_versions
    clipped.weight_versions = [(start, min(end, keep), name) for start, end, name in spans if start < keep]
    return clipped
