"""The numbers of one rollout, for Slime's log: names as keys, every value a finite number."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from polar.endings import SlimeStatus
from polar.records import Drop
from slime_bridge.acceptance import Dropped, Group
from slime_bridge.adapter import ConvertedSession
from slime_bridge.ledger import Ledger
from slime_bridge.staleness import Age

STAGES = ("register_to_init_queue", "init", "run", "postrun")


@dataclass
class SinceLastCall:
    """What happened between two returns of the rollout function."""

    drops: Counter[Drop] = field(default_factory=Counter)
    dropped_sessions: int = 0
    wasted_tokens: Counter[Drop] = field(default_factory=Counter)
    stragglers: int = 0

    def dropped(self, dropped: Dropped) -> None:
        self.drops[dropped.reason] += 1
        self.dropped_sessions += dropped.sessions
        self.wasted_tokens[dropped.reason] += dropped.tokens


def train_metrics(
    groups: Sequence[Group],
    ages: Sequence[Age],
    since: SinceLastCall,
    scheduler: Mapping[str, int],
    ledger: Ledger,
) -> dict[str, float]:
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
    }
    return numbers | _ledger_metrics(ledger)


def _drop_metrics(since: SinceLastCall, sessions: Sequence[ConvertedSession]) -> dict[str, float]:
    lost = sum(session.trained == 0 for session in sessions)
    numbers: dict[str, float] = {f"polar/dropped_{drop.value}_groups": since.drops[drop] for drop in Drop}
    numbers |= {f"polar/wasted_tokens/{drop.value}": since.wasted_tokens[drop] for drop in Drop}
    return numbers | {
        "polar/dropped_groups": since.drops.total(),
        "polar/replaced_stragglers": since.stragglers,
        "polar/dropped_sessions": since.dropped_sessions + lost,
    }


def _session_metrics(sessions: Sequence[ConvertedSession]) -> dict[str, float]:
    """A session that is not trained counts as reward 0 in reward_mean, and not at all in reward_mean_completed."""
    rewards = [session.reward for session in sessions]
    timings = [session.result.timing for session in sessions if session.result is not None]
    numbers = {
        f"polar/session_ms/{stage}_mean": mean(getattr(timing, f"{stage}_ms") or 0.0 for timing in timings)
        for stage in STAGES
    }
    return numbers | {
        "polar/reward_mean": mean(rewards),
        "polar/reward_std": statistics.stdev(rewards) if len(rewards) > 1 else 0.0,
        "polar/reward_mean_completed": mean(session.reward for session in sessions if session.completed),
        "polar/rollout_success_rate": mean(session.completed for session in sessions),
        "polar/truncated_rate": mean(session.status is SlimeStatus.TRUNCATED for session in sessions),
        "polar/samples_per_trajectory": mean(len(session.samples) for session in sessions if session.trained),
    }


def _token_metrics(sessions: Sequence[ConvertedSession]) -> dict[str, float]:
    """The sessions' own ledgers added up: sampled = trainable + Σ excluded. Then what was trained of it."""
    totals: Counter[str] = Counter()
    for session in sessions:
        trajectory = session.result.trajectory if session.result is not None else None
        told = trajectory.metadata if trajectory is not None else {}
        tokens = told.get("tokens") or {}
        totals.update({name: tokens.get(name, 0) for name in ("sampled", "trainable", "attempt_discarded")})
        totals.update({f"excluded/{reason}": count for reason, count in (tokens.get("excluded") or {}).items()})
        totals.update({f"calls/{name}": count for name, count in (told.get("calls") or {}).items()})
    excluded = sum(count for name, count in totals.items() if name.startswith("excluded/"))
    trained = sum(session.trained for session in sessions)
    numbers: dict[str, float] = {
        f"polar/{name}" if name.startswith("calls/") else f"polar/tokens/{name}": count
        for name, count in totals.items()
    }
    return numbers | {
        "polar/tokens/excluded": excluded,
        "polar/tokens/trained": trained,
        "polar/tokens/trained_per_sampled": _share(trained, totals["sampled"]),
        "polar/calls/prefilled_again_share": _share(totals["calls/prefilled_again"], totals["calls/prompt_tokens"]),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _ledger_metrics(ledger: Ledger) -> dict[str, float]:
    """Since the worker began."""
    numbers: dict[str, float] = {"polar/ledger/balanced": ledger.balanced}
    for name, account in (("tokens", ledger.tokens), ("groups", ledger.groups)):
        numbers |= {f"polar/ledger/{name}/{part}": getattr(account, part) for part in ("arrived", "trained", "waiting")}
        numbers |= {f"polar/ledger/{name}/dropped/{reason}": count for reason, count in account.dropped.items()}
    return {name: int(value) for name, value in numbers.items()}


def mean(values: Iterable[float]) -> float:
    collected = [float(value) for value in values]
    return statistics.fmean(collected) if collected else 0.0
