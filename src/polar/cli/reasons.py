"""Why data is missing from a task: a pure function of its status. Every ending and every exclusion that the house knows
has words here, so nothing is ever dropped without a name and a session id."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from polar.cli.results import termination as ending_of
from polar.cli.results import tokens
from polar.endings import TABLE
from polar.records import Drop, Exclusion, SessionResult, SessionStatus, TaskStatus, Termination

ENDINGS: dict[Termination, str] = {
    Termination.QUEUE: "no gateway took it before its queue budget was spent",
    Termination.SANDBOX_START: "the sandbox did not come up; `polar doctor` tries the runtimes of this machine",
    Termination.PREPARE: "a prepare action, or setting the harness up, failed: the task's own fault, not retried",
    Termination.BUILD: "the trajectory could not be built; the session's log is kept: `polar rebuild`",
    Termination.DONE: "the harness ended by itself",
    Termination.HARNESS_EXIT: "the harness ended with an exit code other than 0; graded and trained all the same",
    Termination.LIMIT: "a limit of the task was reached; graded and trained, as cut off",
    Termination.CONTEXT: "the prompt outgrew the model's context; graded and trained, as cut off",
    Termination.AGENT_TIMEOUT: "the agent's time was up (timeout_seconds); graded for information, not trained",
    Termination.NO_CALLS: (
        "no call of the harness reached the model; if none was refused: does it use the base URL and key of its "
        "environment?"
    ),
    Termination.SANDBOX_LIMIT: "the sandbox's memory or process limit killed it; graded and trained",
    Termination.INFRASTRUCTURE: "something of the infrastructure failed, in every attempt; never a reward",
    Termination.EVALUATION: "the evaluator failed twice, so there is no reward and nothing is trained",
    Termination.CANCELLED: "cancelled by whoever submitted it",
    Termination.EARLY_STOP: "stopped because its group had enough usable sessions",
}

EXCLUSIONS: dict[Exclusion, str] = {
    Exclusion.AUXILIARY_CALL: "sampled for the harness's small helper model (include_auxiliary trains them)",
    Exclusion.UNDELIVERED: "the answer never reached the harness, and nothing continued from it",
    Exclusion.ABORTED: "the call was cut off before its end",
    Exclusion.CONSTRAINED: "sampled under a grammar, a forced call, a penalty or a bias, which no trainer computes",
    Exclusion.IMAGES: "its context has images, which a trainer does not get",
    Exclusion.UNKNOWN_CONTEXT: "the engine never said which prompt ids it had for them",
    Exclusion.OVER_LIMIT: "sampled after a limit of the session had been reached",
}


class Finding(msgspec.Struct, kw_only=True):
    """One reason, and every session it holds for. `kind`: ending, excluded, logprobs, untrained or reward."""

    kind: str
    reason: str
    meaning: str
    tokens: int = 0
    sessions: list[str] = []
    errors: list[str] = []
    """the distinct error messages, in the order they were met"""


class Report(msgspec.Struct, kw_only=True):
    """sampled = trainable + the tokens of the `excluded` findings, over the finished sessions."""

    task_id: str
    status: str
    sessions: int
    finished: int
    waiting_for: str | None
    error: str | None
    sampled: int
    trainable: int
    attempt_discarded: int
    findings: list[Finding]


def report(status: TaskStatus) -> Report:
    ledgers = [tokens(result) for result in status.results]
    return Report(
        task_id=status.task_id,
        status=status.status,
        sessions=status.total_sessions,
        finished=status.completed_sessions,
        waiting_for=status.waiting_for,
        error=status.error,
        sampled=sum(ledger.get("sampled", 0) for ledger in ledgers),
        trainable=sum(ledger.get("trainable", 0) for ledger in ledgers),
        attempt_discarded=sum(ledger.get("attempt_discarded", 0) for ledger in ledgers),
        findings=_merged(finding for result in status.results for finding in _findings(result)),
    )


def _findings(result: SessionResult) -> Iterator[Finding]:
    yield from _ending(result)
    yield from _exclusions(result)
    yield from _training(result)


def _one(result: SessionResult, kind: str, reason: str, meaning: str, count: int = 0) -> Finding:
    return Finding(kind=kind, reason=reason, meaning=meaning, tokens=count, sessions=[result.session_id])


def _ending(result: SessionResult) -> Iterator[Finding]:
    name = ending_of(result)
    if name == Termination.DONE and result.status is SessionStatus.COMPLETED:
        return
    finding = _one(result, "ending", name, ENDINGS[_termination(name)])
    finding.errors = [result.error] if result.error else []
    yield finding


def _termination(name: str) -> Termination:
    """A fault goes by its own name: it is of the infrastructure."""
    return Termination(name) if name in list(Termination) else Termination.INFRASTRUCTURE


def untrained(result: SessionResult) -> str | None:
    """Why nothing of a session will be trained: what it ended as, or zero_trainable. None where something will be."""
    name = ending_of(result)
    if not TABLE[_termination(name)].trained:
        return name
    traces = result.trajectory.traces if result.trajectory else []
    return None if any(trace.trainable for trace in traces) else Drop.ZERO_TRAINABLE.value


def _exclusions(result: SessionResult) -> Iterator[Finding]:
    for reason, count in tokens(result).get("excluded", {}).items():
        meaning = EXCLUSIONS[Exclusion(reason)] if reason in list(Exclusion) else reason
        if count:
            yield _one(result, "excluded", reason, meaning, count)


def _training(result: SessionResult) -> Iterator[Finding]:
    """What stands in the way of training a session that ended well enough to be trained."""
    if result.trajectory is None or not TABLE[_termination(ending_of(result))].trained:
        return
    traces = result.trajectory.traces
    spoiled = sum(trace.trainable for trace in traces if trace.trainable and trace.response_logprobs is None)
    if spoiled:
        meaning = "sampled tokens without a logprob that a trainer would compute: it refuses the whole group"
        yield _one(result, "logprobs", "logprob_error", meaning, spoiled)
    if not any(trace.trainable for trace in traces):
        without_ids = result.trajectory.metadata.get("calls", {}).get("without_ids")
        why = "its engine gives no token ids" if without_ids else "no token of it is trainable"
        yield _one(result, "untrained", Drop.ZERO_TRAINABLE.value, f"{why}: nothing to learn from")
    elif all(trace.reward is None for trace in traces):
        yield _one(result, "reward", "no_reward", "it has no reward: the task has no evaluator")


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Equal reasons as one, the order of kinds as above, the most frequent first."""
    merged: dict[tuple[str, str], Finding] = {}
    for finding in findings:
        known = merged.setdefault((finding.kind, finding.reason), finding)
        if known is not finding:
            known.tokens += finding.tokens
            known.sessions += finding.sessions
            known.errors = list(dict.fromkeys(known.errors + finding.errors))
    order = ("ending", "excluded", "logprobs", "untrained", "reward")
    return sorted(merged.values(), key=lambda item: (order.index(item.kind), -len(item.sessions)))
