"""The figures that tasks and sessions show without their results being read."""

from __future__ import annotations

import math
from collections import Counter

from polar.endings import TABLE
from polar.nodeapi import NodeResult
from polar.records import EvaluationResult, SessionStatus
from polar.server.state import Session, Tally, Task


def note(session: Session, result: NodeResult, *, graded: bool) -> None:
    """Copies an accepted result's figures. `usable` = it counts for early stop: trained, and with a reward where the
    task has an evaluator."""
    session.timing, session.fault, session.error = result.timing, result.fault, result.error
    session.reward = reward_of(result.evaluation)
    session.traces = len(result.traces) if result.traces is not None else None
    session.completions = result.calls.completions if result.calls is not None else None
    rewarded = session.reward is not None or not graded
    session.usable = TABLE[result.termination].trained and bool(result.traces) and rewarded


def reward_of(evaluation: EvaluationResult | None) -> float | None:
    """The outcome, else the mean over the traces; None where there is none, or one that is not finite."""
    if evaluation is None:
        return None
    rewards = evaluation.trace_rewards or []
    value = evaluation.outcome_reward if not rewards else sum(rewards) / len(rewards)
    return value if value is not None and math.isfinite(value) else None


def recount(task: Task) -> None:
    """From all its sessions, for a task as it was saved."""
    task.tally = Tally()
    for session in task.sessions:
        if session.status.terminal:
            count(task, session)


def count(task: Task, session: Session) -> None:
    """One more session is over."""
    tally = task.tally
    tally.over += 1
    tally.errors += session.status is SessionStatus.ERROR
    tally.usable += session.usable
    task.completed_sessions, task.errored_sessions = tally.over, tally.errors
    task.mean_reward = tally.rewards.add(session.reward)
    task.mean_traces = tally.traces.add(session.traces)
    task.mean_completions = tally.completions.add(session.completions)


def why_failed(task: Task) -> str:
    """Such as: no session produced a trajectory: 3 infrastructure, 1 queue; the gateway a was lost."""
    counts = Counter(session.termination.value for session in task.sessions if session.termination is not None)
    causes = ", ".join(f"{number} {name}" for name, number in counts.most_common())
    first = next((session.error for session in task.sessions if session.error), None)
    return f"no session produced a trajectory: {causes}" + (f"; {first}" if first else "")
