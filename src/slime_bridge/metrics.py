"""The numbers of one rollout, for Slime's log: names as keys, every value a finite number."""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from polar.endings import SlimeStatus
from polar.records import CallCounts, Drop, Exclusion, SessionTiming
from slime_bridge.acceptance import Dropped, Group
from slime_bridge.adapter import ConvertedSession
from slime_bridge.fitting import Unused
from slime_bridge.ledger import Ledger
from slime_bridge.staleness import Age

Numbers = dict[str, float]
STAGES = tuple(name.removesuffix("_ms") for name in SessionTiming.__struct_fields__)
DROPPED_TRACES = (Unused.EMPTY.value, Unused.OVERLONG.value)
SAMPLED = dict.fromkeys(("sampled", "trainable", "attempt_discarded"), 0)
EXCLUDED = dict.fromkeys((reason.value for reason in Exclusion), 0)
CALLS = dict.fromkeys(CallCounts.__struct_fields__, 0)
"""Every name is always there, so that a curve begins at 0."""


@dataclass
class SinceLastCall:
    """What happened between two returns of the rollout function."""

    drops: Counter[Drop] = field(default_factory=Counter)
    dropped_sessions: int = 0
    wasted_tokens: Counter[Drop] = field(default_factory=Counter)
    stragglers: int = 0
    dropped_traces: Counter[str] = field(default_factory=Counter)
    """of dropped groups"""

    def dropped(self, dropped: Dropped) -> None:
        self.drops[dropped.reason] += 1
        self.dropped_sessions += dropped.sessions
        self.wasted_tokens[dropped.reason] += dropped.tokens
        self.dropped_traces += dropped.traces


def train_metrics(
    groups: Sequence[Group],
    ages: Sequence[Age],
    since: SinceLastCall,
    scheduler: Mapping[str, int],
    ledger: Ledger,
) -> Numbers:
    """`groups` go to the trainer now, at these `ages`."""
    sessions = [session for group in groups for session in group.sessions]
    numbers = _drop_metrics(since, sessions) | _session_metrics(sessions) | _token_metrics(sessions)
    numbers |= {f"polar/scheduler/{name}": value for name, value in scheduler.items()}
    numbers |= {
        "polar/completed_groups": len(groups),
        "polar/staleness/mean": mean(age.rollouts for age in ages),
        "polar/staleness/max": max((age.rollouts for age in ages), default=0),
        "polar/staleness/unknown_versions": sum(age.unknown for age in ages),
        "polar/versions_spanned": mean(len(group.versions) for group in groups),
        "polar/versions_spanned_max": max((len(group.versions) for group in groups), default=0),
    }
    return numbers | _ledger_metrics(ledger)


def _drop_metrics(since: SinceLastCall, sessions: Sequence[ConvertedSession]) -> Numbers:
    lost = sum(session.trained == 0 for session in sessions)
    traces = sum((session.dropped_traces for session in sessions), since.dropped_traces)
    numbers: Numbers = {f"polar/dropped_{drop.value}_groups": since.drops[drop] for drop in Drop}
    numbers |= {f"polar/wasted_tokens/{drop.value}": since.wasted_tokens[drop] for drop in Drop}
    numbers |= {f"polar/dropped_traces/{reason}": traces[reason] for reason in DROPPED_TRACES}
    return numbers | {
        "polar/clipped_traces": sum(session.clipped_traces for session in sessions),
        "polar/dropped_groups": since.drops.total(),
        "polar/replaced_stragglers": since.stragglers,
        "polar/dropped_sessions": since.dropped_sessions + lost,
    }


def _session_metrics(sessions: Sequence[ConvertedSession]) -> Numbers:
    """A session that is not trained counts as reward 0 in reward_mean; reward_mean_completed is over those that are."""
    rewards = [session.reward for session in sessions]
    traces = [len(session.samples) for session in sessions if session.trained]
    timings = [session.result.timing for session in sessions if session.result is not None]
    return {f"polar/session_ms/{stage}_mean": mean(_spent(timings, stage)) for stage in STAGES} | {
        "polar/reward_mean": mean(rewards),
        "polar/reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "polar/reward_mean_completed": mean(session.reward for session in sessions if session.completed),
        "polar/rollout_success_rate": mean(session.completed for session in sessions),
        "polar/truncated_rate": mean(session.status is SlimeStatus.TRUNCATED for session in sessions),
        "polar/samples_per_trajectory": mean(traces),
        "polar/samples_per_trajectory_max": max(traces, default=0),
    }


def _spent(timings: Iterable[SessionTiming], stage: str) -> list[float]:
    """Of the sessions that came so far."""
    spent = (getattr(timing, f"{stage}_ms") for timing in timings)
    return [each for each in spent if each is not None and math.isfinite(each)]


def _token_metrics(sessions: Sequence[ConvertedSession]) -> Numbers:
    """The sessions' own ledgers added up: sampled = trainable + Σ excluded. Then what was trained of it."""
    tokens, excluded, calls = Counter(SAMPLED), Counter(EXCLUDED), Counter(CALLS)
    for session in sessions:
        trajectory = session.result.trajectory if session.result is not None else None
        told = trajectory.metadata if trajectory is not None else {}
        tokens.update(_counts(told.get("tokens")))
        excluded.update(_counts((told.get("tokens") or {}).get("excluded")))
        calls.update(_counts(told.get("calls")))
    trained = sum(session.trained for session in sessions)
    numbers: Numbers = {f"polar/tokens/{name}": count for name, count in tokens.items()}
    numbers |= {f"polar/tokens/excluded/{reason}": count for reason, count in excluded.items()}
    numbers |= {f"polar/calls/{name}": count for name, count in calls.items()}
    return numbers | {
        "polar/tokens/excluded": excluded.total(),
        "polar/tokens/trained": trained,
        "polar/tokens/trained_per_sampled": _share(trained, tokens["sampled"]),
        "polar/calls/prefilled_again_share": _share(calls["prefilled_again"], calls["prompt_tokens"]),
    }


def _counts(told: Any) -> dict[str, int]:
    """The whole numbers of a part of a result's metadata."""
    return {name: count for name, count in (told or {}).items() if type(count) is int}


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ledger_metrics(ledger: Ledger) -> Numbers:
    """Since the worker began."""
    numbers: Numbers = {"polar/ledger/balanced": int(ledger.balanced)}
    for name, account, reasons in (
        ("tokens", ledger.tokens, [*Drop, *Unused]),
        ("groups", ledger.groups, [*Drop]),
    ):
        numbers |= {f"polar/ledger/{name}/{part}": getattr(account, part) for part in ("arrived", "trained", "waiting")}
        dropped = dict.fromkeys((reason.value for reason in reasons), 0) | account.dropped
        numbers |= {f"polar/ledger/{name}/dropped/{reason}": count for reason, count in dropped.items()}
    return numbers


def mean(values: Iterable[float]) -> float:
    collected = [float(value) for value in values]
    return statistics.fmean(collected) if collected else 0.0
