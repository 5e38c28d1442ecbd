"""One session's result → the trainer's samples: tokens untouched, everything aligned, or refused by name.

A session whose ending is not trained, whose reward is no number, or that has no usable trace becomes one masked
placeholder, so that its group keeps its size.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field, is_dataclass
from typing import Any

import numpy as np

from polar.codec import to_builtins
from polar.endings import TABLE, Ending, SlimeStatus
from polar.records import SessionResult, SessionStatus, Termination, Trace
from slime_bridge._messages import readable
from slime_bridge.fitting import ConversionRules, Fitted, FittedTrace, RolloutLogprobError, Unused, fit
from slime_bridge.shaping import finite
from slime_bridge.slime_types import group_together, slime_status

__all__ = ["ConversionRules", "ConvertedSession", "RolloutLogprobError", "session_result_to_samples"]

_READ_BY_SLIME = ("raw_reward", "round_number")
"""Keys of a sample's metadata that Slime puts into the batch once one sample has them: no prompt may set them."""
_PUT_IN_BY_SLIME = (
    "multimodal_train_inputs",
    "rollout_routed_experts",
    "rollout_top_p_token_ids",
    "rollout_top_p_token_offsets",
    "teacher_log_probs",
    "train_metadata",
)
"""Fields that Slime puts into the batch once one sample has them: no sample has them, whatever its source had."""
_MADE_HERE = frozenset({"tokens", "loss_mask", "rollout_log_probs", "weight_versions", "metadata", "status", "reward"})
_BY_NAME: dict[Any, Termination] = {each.value: each for each in Termination}
_BY_STATUS = {SessionStatus.COMPLETED: Termination.DONE, SessionStatus.TIMEOUT: Termination.AGENT_TIMEOUT}
_UNCHANGING = frozenset({type(None), bool, int, float, str})


@dataclass
class ConvertedSession:
    """`samples` is never empty. arrived = trained + Σ unused, in trainable tokens."""

    samples: list[Any]
    status: SlimeStatus
    result: SessionResult | None
    arrived: int = 0
    trained: int = 0
    unused: Counter[str] = field(default_factory=Counter)
    dropped_traces: Counter[str] = field(default_factory=Counter)
    clipped_traces: int = 0
    versions: frozenset[str] = frozenset()
    """policy versions of the trained tokens"""
    reward: float = 0.0
    """the mean over the trained traces; 0.0 where nothing is trained"""

    @property
    def completed(self) -> bool:
        return self.result is not None and self.result.status is SessionStatus.COMPLETED


def session_result_to_samples(
    result: SessionResult | None, source: Any, rules: ConversionRules | None = None
) -> list[Any]:
    """One sample a usable trace, each a copy of `source`; else one placeholder. Raises RolloutLogprobError."""
    return convert_session(result, source, rules or ConversionRules()).samples


def convert_session(result: SessionResult | None, source: Any, rules: ConversionRules) -> ConvertedSession:
    """`result` None: the session never came back. Raises RolloutLogprobError, GroupingError."""
    if result is None:
        return _masked(None, source, rules, SlimeStatus.FAILED, Fitted())
    traces = _traces(result)
    ending = ending_of(result)
    graded = all(finite(trace.reward) is not None for trace in traces)
    if not is_trained(ending, rules) or not graded:
        arrived = Counter({Unused.MASKED_SESSION.value: sum(trace.trainable for trace in traces)})
        status = SlimeStatus.FAILED if is_trained(ending, rules) else _status(ending, result, rules)
        return _masked(result, source, rules, status, Fitted(unused=arrived))
    fitted = fit(traces, rules)
    if not fitted.traces:
        return _masked(result, source, rules, SlimeStatus.FAILED, fitted)
    return _converted(result, source, rules, _status(ending, result, rules), fitted)


def shown_sample(result: SessionResult | None, source: Any, rules: ConversionRules, reward: float) -> Any:
    """The session's last trace as it is, for people: nothing is checked, capped or masked."""
    if result is None or not (traces := _traces(result)) or not len(traces[-1].response_ids):
        status = SlimeStatus.FAILED if result is None else _status(ending_of(result), result, rules)
        sample = _placeholder(source, rules, status, _facts(result))
    else:
        last = FittedTrace(len(traces) - 1, traces[-1], traces[-1].trainable, [])
        sample = _sample(last, source, rules, _status(ending_of(result), result, rules), _facts(result))
    sample.reward = rules.reward(reward)
    return sample


def reward_of(result: SessionResult | None, rules: ConversionRules) -> float:
    """What the session earned, for evaluation: 0.0 where its ending is not trained or nothing graded it."""
    if result is None or result.trajectory is None or not is_trained(ending_of(result), rules):
        return 0.0
    outcome = (result.trajectory.metadata.get("evaluation") or {}).get("outcome_reward")
    given = [trace.reward for trace in _traces(result)] if outcome is None else [outcome]
    rewards = [reward for each in given if (reward := finite(each)) is not None]
    return _mean(rewards) if rewards and len(rewards) == len(given) else 0.0


def ending_of(result: SessionResult) -> Ending:
    """The row of the table of endings; a server that names no termination is judged by the session's status."""
    by_status = _BY_STATUS.get(result.status, Termination.INFRASTRUCTURE)
    return TABLE[_BY_NAME.get(result.metadata.get("termination"), by_status)]


def _converted(
    result: SessionResult, source: Any, rules: ConversionRules, status: SlimeStatus, fitted: Fitted
) -> ConvertedSession:
    facts = _facts(result)
    samples = [_sample(each, source, rules, status, facts) for each in fitted.traces]
    group_together(samples, source.index)
    return ConvertedSession(
        samples,
        status,
        result,
        arrived=fitted.trainable + fitted.unused.total(),
        trained=fitted.trainable,
        unused=fitted.unused,
        dropped_traces=fitted.dropped,
        clipped_traces=fitted.clipped,
        versions=frozenset(version for each in fitted.traces for _, _, version in each.spans),
        reward=_mean(finite(each.trace.reward) or 0.0 for each in fitted.traces),
    )


def _masked(
    result: SessionResult | None, source: Any, rules: ConversionRules, status: SlimeStatus, fitted: Fitted
) -> ConvertedSession:
    samples = [_placeholder(source, rules, status, _facts(result))]
    group_together(samples, source.index)
    unused = fitted.unused
    return ConvertedSession(samples, status, result, unused.total(), 0, unused, fitted.dropped)


def _traces(result: SessionResult) -> list[Trace]:
    return result.trajectory.traces if result.trajectory is not None else []


def is_trained(ending: Ending, rules: ConversionRules) -> bool:
    return ending.trained or (ending is TABLE[Termination.AGENT_TIMEOUT] and rules.timeout_policy == "truncate")


def _status(ending: Ending, result: SessionResult, rules: ConversionRules) -> SlimeStatus:
    if ending is TABLE[Termination.AGENT_TIMEOUT] and rules.timeout_policy == "truncate":
        return SlimeStatus.TRUNCATED
    traces = _traces(result)
    cut = bool(traces) and traces[-1].finish_reason == "length"
    return SlimeStatus.TRUNCATED if ending.slime is SlimeStatus.COMPLETED and cut else ending.slime


def _sample(
    fitted: FittedTrace, source: Any, rules: ConversionRules, status: SlimeStatus, facts: dict[str, Any]
) -> Any:
    trace = fitted.trace
    sample = _copy(source, status, rules, finite(trace.reward) or 0.0)
    sample.tokens = np.concatenate((trace.prompt_ids, trace.response_ids)).tolist()
    sample.prompt = trace.prompt_messages or source.prompt
    sample.response = readable(trace.response_messages)
    sample.response_length = len(trace.response_ids)
    sample.loss_mask = trace.loss_mask.tolist()
    sample.rollout_log_probs = None if trace.response_logprobs is None else trace.response_logprobs.tolist()
    sample.weight_versions = [version for _, _, version in fitted.spans]
    spans = [list(span) for span in trace.weight_versions]
    sample.metadata["polar"] = to_builtins(facts) | {"trace_index": fitted.index, "weight_versions": spans}
    return sample


def _placeholder(source: Any, rules: ConversionRules, status: SlimeStatus, facts: dict[str, Any]) -> Any:
    """Two tokens, the second a masked response: takes its trajectory's place and trains nothing."""
    sample = _copy(source, status, rules, 0.0)
    sample.tokens, sample.response, sample.response_length = [0, 0], "", 1
    sample.loss_mask, sample.rollout_log_probs, sample.remove_sample = [0], [0.0], True
    sample.weight_versions = []
    sample.metadata["polar"] = facts | {"placeholder": True}
    return sample


def _copy(source: Any, status: SlimeStatus, rules: ConversionRules, reward: float) -> Any:
    """Shares nothing that could be changed with the source or with a sibling."""
    sample = _twin(source)
    for name, value in vars(source).items():
        if type(value) not in _UNCHANGING and name not in _MADE_HERE:
            setattr(sample, name, None if name in _PUT_IN_BY_SLIME else _own(value))
    given = source.metadata or {}
    sample.metadata = {key: copy.deepcopy(value) for key, value in given.items() if key not in _READ_BY_SLIME}
    sample.status, sample.remove_sample = slime_status(status), False
    sample.reward = rules.reward(reward)
    return sample


def _own(value: Any) -> Any:
    """In depth, but for Slime's two records of counts, which hold numbers alone."""
    return _twin(value) if is_dataclass(value) else copy.deepcopy(value)


def _twin(thing: Any) -> Any:
    """A shallow copy of a dataclass's object, in a third of the time of copy.copy."""
    made = object.__new__(type(thing))
    made.__dict__.update(vars(thing))
    return made


def _facts(result: SessionResult | None) -> dict[str, Any]:
    """What metadata.polar tells of the session."""
    if result is None:
        return {"error": "no result"}
    trajectory = {} if result.trajectory is None else result.trajectory.metadata
    known = {key: trajectory[key] for key in ("evaluation", "tokens", "calls") if key in trajectory}
    return to_builtins(known) | {
        "session_id": result.session_id,
        "task_id": result.task_id,
        "termination": result.metadata.get("termination"),
        "attempt": result.metadata.get("attempt"),
        "timing": to_builtins(result.timing),
        "error": result.error,
    }


def _mean(values: Iterable[float]) -> float:
    collected = list(values)
    return math.fsum(collected) / len(collected)
