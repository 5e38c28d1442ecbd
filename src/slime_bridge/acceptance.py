"""A group is trained whole or dropped whole under a name; both are counted, in groups and in trainable tokens.

The first name that fits is the group's: failed, logprob_error, zero_trainable, low_complete_fraction. (`stale` is found
where the age is known, in `groups`.)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from polar.records import Drop, SessionResult, TaskResult, TaskState
from slime_bridge.adapter import ConvertedSession, convert_session
from slime_bridge.fitting import ConversionRules, RolloutLogprobError
from slime_bridge.slime_types import GroupingError
from slime_bridge.untrained import first_error, why_untrained


@dataclass
class Group:
    """An accepted group: one converted session for each of the data source's samples, in their order."""

    task_id: str
    source: list[Any]
    sessions: list[ConvertedSession]
    submitted: int
    """the rollout that was current when its task was submitted"""

    @property
    def samples(self) -> list[list[Any]]:
        """group × trace, two lists deep: the nest that Slime wants below its list of groups."""
        return [session.samples for session in self.sessions]

    @property
    def index(self) -> int:
        return self.source[0].group_index or 0

    @property
    def arrived(self) -> int:
        return sum(session.arrived for session in self.sessions)

    @property
    def trained(self) -> int:
        return sum(session.trained for session in self.sessions)

    @property
    def unused(self) -> Counter[str]:
        return sum((session.unused for session in self.sessions), Counter())

    @property
    def dropped_traces(self) -> Counter[str]:
        return sum((session.dropped_traces for session in self.sessions), Counter())

    @property
    def versions(self) -> frozenset[str]:
        return frozenset().union(*(session.versions for session in self.sessions))


@dataclass(frozen=True)
class Dropped:
    reason: Drop
    tokens: int
    """trainable tokens that arrived with it"""
    sessions: int
    why: str
    traces: Counter[str] = field(default_factory=Counter)
    """of its traces, those that could not have been trained in any group, by name"""


def judge(
    result: TaskResult, source: list[Any], rules: ConversionRules, *, submitted: int, min_fraction: float
) -> Group | Dropped:
    """`min_fraction`: of the group's sessions, how many must be completed and have a trainable token."""
    tokens = sum(_trainable(session) for session in result.results)
    if result.status is not TaskState.COMPLETED:
        told = first_error(result) or "no session tells an error"
        if result.status is TaskState.CANCELLED:
            told += "; this run did not cancel it: somebody's hand, or another run with the same --save?"
        return Dropped(Drop.FAILED, tokens, len(source), f"the task {result.status.value}: {told}")
    by_index = {session.metadata.get("session_index"): session for session in result.results}
    if len(by_index) < len(result.results) or not by_index.keys() <= set(range(len(source))):
        why = f"its sessions name the samples {sorted(map(str, by_index))} of a group of {len(source)}"
        return Dropped(Drop.FAILED, tokens, len(source), why)
    try:
        sessions = [convert_session(by_index.get(index), one, rules) for index, one in enumerate(source)]
    except GroupingError as error:
        return Dropped(Drop.FAILED, tokens, len(source), str(error))
    except RolloutLogprobError as error:
        return Dropped(Drop.LOGPROB_ERROR, tokens, len(source), str(error))
    group = Group(result.task_id, source, sessions, submitted)
    if group.trained == 0:
        why = why_untrained(result, sessions, rules)
        return Dropped(Drop.ZERO_TRAINABLE, tokens, len(source), why, group.dropped_traces)
    complete = sum(session.completed and session.trained > 0 for session in sessions)
    if complete < min_fraction * len(source):
        why = f"{complete} of {len(source)} sessions complete"
        return Dropped(Drop.LOW_COMPLETE_FRACTION, tokens, len(source), why, group.dropped_traces)
    return group


def _trainable(result: SessionResult) -> int:
    return sum(trace.trainable for trace in result.trajectory.traces) if result.trajectory is not None else 0
