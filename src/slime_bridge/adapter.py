"""One session's result → the trainer's samples: tokens untouched, everything aligned, or refused by name.

A session whose ending is not trained, whose reward is no finite number, or that has no usable trace becomes one masked
placeholder, so that its group keeps its size.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from polar.codec import to_builtins
from polar.endings import TABLE, Ending, SlimeStatus
from polar.records import SessionResult, SessionStatus, Termination, Trace
from slime_bridge._messages import readable
from slime_bridge.slime_types import Sample, grouping_field, slime_status

_READ_BY_SLIME = ("raw_reward", "round_number")
"""Keys of a sample's metadata that Slime puts into the batch once one sample has them: no prompt may set them."""


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


@dataclass
class ConvertedSession:
    """`samples` is never empty. arrived = trained + Σ unused, in trainable tokens."""

    samples: list[Any]
    status: SlimeStatus
    result: SessionResult | None
    arrived: int = 0
    trained: int = 0
    unused: Counter[str] = field(default_factory=Counter)
    versions: frozenset[str] = frozenset()
    """policy versions of the trained tokens"""
    reward: float = 0.0

    @property
    def completed(self) -> bool:
        return self.result is not None and self.result.status is SessionStatus.COMPLETED


def session_result_to_samples(
    result: SessionResult | None, source: Any, rules: ConversionRules | None = None
) -> list[Any]:
    """One sample a usable trace, each a copy of `source`; else one placeholder. Raises RolloutLogprobError."""
    return convert_session(result, source, rules or ConversionRules()).samples


def convert_session(result: SessionResult | None, source: Any, rules: ConversionRules) -> ConvertedSession:
    """`result` None: the session never came back."""
    if result is None:
        status = SlimeStatus.FAILED
        return ConvertedSession([_placeholder(source, status, rules, {"error": "no result"})], status, None)
    ending = ending_of(result)
    status = _status(ending, result, rules)
    traces = result.trajectory.traces if result.trajectory is not None else []
    arrived = sum(trace.trainable for trace in traces)
    if not _trained(ending, rules):
        return _masked(result, source, rules, status, _all_masked(arrived))
    if not all(_finite(trace.reward) for trace in traces):
        return _masked(result, source, rules, SlimeStatus.FAILED, _all_masked(arrived))
    return _converted(result, traces, source, rules, status, arrived)


def reward_of(result: SessionResult | None) -> float:
    """What the session earned, for evaluation: 0.0 where its ending is not trained or nothing graded it."""
    if result is None or result.trajectory is None or not ending_of(result).trained:
        return 0.0
    outcome = (result.trajectory.metadata.get("evaluation") or {}).get("outcome_reward")
    rewards = [trace.reward for trace in result.trajectory.traces] if outcome is None else [outcome]
    finite = [float(reward) for reward in rewards if reward is not None and math.isfinite(reward)]
    return math.fsum(finite) / len(finite) if finite and len(finite) == len(rewards) else 0.0


def ending_of(result: SessionResult) -> Ending:
    """The row of the table of endings; a server that names no termination is judged by the session's status."""
    by_status = {
        SessionStatus.COMPLETED: Termination.DONE,
        SessionStatus.TIMEOUT: Termination.AGENT_TIMEOUT,
    }.get(result.status, Termination.INFRASTRUCTURE)
    named = result.metadata.get("termination")
    return TABLE[Termination(named) if named in {each.value for each in Termination} else by_status]


def _converted(
    result: SessionResult, traces: list[Trace], source: Any, rules: ConversionRules, status: SlimeStatus, arrived: int
) -> ConvertedSession:
    unused: Counter[str] = Counter()
    usable = [(index, fit) for index, trace in enumerate(traces) if (fit := _fitted(trace, rules, unused)) is not None]
    if not usable:
        return _masked(result, source, rules, SlimeStatus.FAILED, unused)
    versions = frozenset(version for _, trace in usable for _, _, version in _trainable_spans(trace))
    samples = [_sample(trace, index, result, source, rules, status) for index, trace in usable]
    trained = sum(trace.trainable for _, trace in usable)
    reward = math.fsum(float(trace.reward or 0.0) for _, trace in usable) / len(usable)
    return ConvertedSession(samples, status, result, arrived, trained, unused, versions, reward)


def _masked(
    result: SessionResult, source: Any, rules: ConversionRules, status: SlimeStatus, unused: Counter[str]
) -> ConvertedSession:
    placeholder = _placeholder(source, status, rules, _facts(result))
    return ConvertedSession([placeholder], status, result, unused.total(), 0, unused)


def _all_masked(arrived: int) -> Counter[str]:
    return Counter({Unused.MASKED_SESSION.value: arrived})


def _trained(ending: Ending, rules: ConversionRules) -> bool:
    return ending.trained or (ending is TABLE[Termination.AGENT_TIMEOUT] and rules.timeout_policy == "truncate")


def _status(ending: Ending, result: SessionResult, rules: ConversionRules) -> SlimeStatus:
    if ending is TABLE[Termination.AGENT_TIMEOUT] and rules.timeout_policy == "truncate":
        return SlimeStatus.TRUNCATED
    traces = result.trajectory.traces if result.trajectory is not None else []
    cut = bool(traces) and traces[-1].finish_reason == "length"
    return SlimeStatus.TRUNCATED if ending.slime is SlimeStatus.COMPLETED and cut else ending.slime


def _fitted(trace: Trace, rules: ConversionRules, unused: Counter[str]) -> Trace | None:
    """The trace within the cap, or None where nothing of it can be trained. Raises RolloutLogprobError."""
    _check_aligned(trace)
    before = trace.trainable
    if before == 0:
        return None
    if len(trace.prompt_ids) == 0:
        unused[Unused.EMPTY.value] += before
        return None
    fit = _within(trace, rules)
    kept = fit.trainable if fit is not None else 0
    if kept < before:
        unused[Unused.OVERLONG.value] += before - kept
    return fit if kept else None


def _within(trace: Trace, rules: ConversionRules) -> Trace | None:
    prompt, total = len(trace.prompt_ids), len(trace.prompt_ids) + len(trace.response_ids)
    if rules.max_tokens is None or total <= rules.max_tokens:
        return trace
    if rules.overlong == "drop" or prompt >= rules.max_tokens:
        return None
    return _clipped(trace, rules.max_tokens - prompt)


def _clipped(trace: Trace, keep: int) -> Trace:
    """The exact causal prefix of `keep` response tokens."""
    assert trace.response_logprobs is not None
    clipped = copy.copy(trace)
    clipped.response_ids, clipped.loss_mask = trace.response_ids[:keep], trace.loss_mask[:keep]
    clipped.response_logprobs = trace.response_logprobs[:keep]
    spans = trace.weight_versions
    clipped.weight_versions = [(start, min(end, keep), name) for start, end, name in spans if start < keep]
    return clipped


def _check_aligned(trace: Trace) -> None:
    length = len(trace.response_ids)
    if len(trace.loss_mask) != length:
        raise RolloutLogprobError(f"a mask of {len(trace.loss_mask)} for {length} tokens")
    if not trace.loss_mask.any():
        return
    logprobs = trace.response_logprobs
    if logprobs is None:
        raise RolloutLogprobError(f"{trace.trainable} trainable tokens without logprobs")
    if len(logprobs) != length:
        raise RolloutLogprobError(f"{len(logprobs)} logprobs for {length} tokens")
    if not np.isfinite(logprobs).all():
        raise RolloutLogprobError("a logprob is not finite")


def _sample(
    trace: Trace, index: int, result: SessionResult, source: Any, rules: ConversionRules, status: SlimeStatus
) -> Any:
    assert trace.response_logprobs is not None
    sample = _copy(source, status, rules, float(trace.reward or 0.0))
    sample.tokens = trace.prompt_ids.tolist() + trace.response_ids.tolist()
    sample.prompt = trace.prompt_messages or source.prompt
    sample.response = readable(trace.response_messages)
    sample.response_length = len(trace.response_ids)
    sample.loss_mask = trace.loss_mask.tolist()
    sample.rollout_log_probs = trace.response_logprobs.tolist()
    sample.weight_versions = [version for _, _, version in _trainable_spans(trace)]
    spans = [list(span) for span in trace.weight_versions]
    sample.metadata["polar"] = _facts(result) | {"trace_index": index, "weight_versions": spans}
    return sample


def _placeholder(source: Any, status: SlimeStatus, rules: ConversionRules, facts: dict[str, Any]) -> Any:
    """Two tokens, the second a masked response: takes its trajectory's place and trains nothing."""
    sample = _copy(source, status, rules, 0.0)
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.remove_sample = [0], [0.0], True
    sample.weight_versions = []
    sample.metadata["polar"] = facts | {"placeholder": True}
    return sample


def _copy(source: Any, status: SlimeStatus, rules: ConversionRules, reward: float) -> Any:
    sample = copy.copy(source)
    setattr(sample, grouping_field(Sample), source.index)
    sample.status = slime_status(status)
    sample.reward = rules.reward(reward)
    sample.metadata = {key: value for key, value in (source.metadata or {}).items() if key not in _READ_BY_SLIME}
    return sample


def _facts(result: SessionResult) -> dict[str, Any]:
    """What metadata.polar tells of the session."""
    trajectory = {} if result.trajectory is None else result.trajectory.metadata
    known = {key: trajectory[key] for key in ("evaluation", "tokens", "calls") if key in trajectory}
    return known | {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "termination": result.metadata.get("termination"),
        "attempt": result.metadata.get("attempt"),
        "timing": to_builtins(result.timing),
        "error": result.error,
    }


def _trainable_spans(trace: Trace) -> list[tuple[int, int, str]]:
    return [span for span in trace.weight_versions if trace.loss_mask[span[0] : span[1]].any()]


def _finite(reward: float | None) -> bool:
    return reward is not None and math.isfinite(reward)
