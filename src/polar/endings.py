"""The table of endings: how each way a session can end is named, graded and trained. It decides the gradient."""

from __future__ import annotations

from enum import StrEnum

import msgspec

from polar.records import SessionStatus, Termination


class SlimeStatus(StrEnum):
    """Names of the trainer's sample statuses."""

    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


class Ending(msgspec.Struct, frozen=True):
    """One row. `forced_finish` replaces the last trace's finish_reason; None keeps the model's.

    What is trained stands in its group's baseline, and nothing else does. A bridge setting trains AGENT_TIMEOUT too.
    """

    status: SessionStatus
    slime: SlimeStatus
    trained: bool = False
    builds: bool = False
    """a trajectory is built, and graded where the task has an evaluator"""
    retried: bool = False
    forced_finish: str | None = None


_C, _E, _T = SessionStatus.COMPLETED, SessionStatus.ERROR, SessionStatus.TIMEOUT
_LOST = Ending(_E, SlimeStatus.FAILED)
_INFRASTRUCTURE = Ending(_E, SlimeStatus.FAILED, retried=True)
_GOOD = Ending(_C, SlimeStatus.COMPLETED, trained=True, builds=True)
_CUT = Ending(_C, SlimeStatus.TRUNCATED, trained=True, builds=True, forced_finish="length")
_STOPPED = Ending(_E, SlimeStatus.ABORTED)

TABLE: dict[Termination, Ending] = {
    Termination.QUEUE: Ending(_T, SlimeStatus.FAILED),
    Termination.SANDBOX_START: _INFRASTRUCTURE,
    Termination.PREPARE: _LOST,
    Termination.BUILD: _LOST,
    Termination.DONE: _GOOD,
    Termination.HARNESS_EXIT: _GOOD,
    Termination.LIMIT: _CUT,
    Termination.CONTEXT: _CUT,
    Termination.AGENT_TIMEOUT: Ending(_T, SlimeStatus.ABORTED, builds=True),
    Termination.NO_CALLS: _LOST,
    Termination.SANDBOX_LIMIT: _GOOD,
    Termination.INFRASTRUCTURE: _INFRASTRUCTURE,
    Termination.EVALUATION: Ending(_E, SlimeStatus.FAILED, builds=True),
    Termination.CANCELLED: _STOPPED,
    Termination.EARLY_STOP: _STOPPED,
}

EVALUATION_REPLACES = frozenset(
    {Termination.DONE, Termination.HARNESS_EXIT, Termination.LIMIT, Termination.CONTEXT, Termination.SANDBOX_LIMIT}
)


class RunFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What is known when RUN has ended; `decide` turns it into one termination."""

    stopped: Termination | None = None
    """CANCELLED or EARLY_STOP"""
    fault: str | None = None
    """name of an infrastructure fault, also an engine fault that the proxy's retries did not heal"""
    calls: int = 0
    """model calls that reached the engine"""
    needs_calls: bool = True
    """False for a harness that declares that it makes no model call"""
    timed_out: bool = False
    limit: bool = False
    context: bool = False
    sandbox_limit: bool = False
    exit_code: int = 0


def decide(facts: RunFacts) -> Termination:
    """The first that holds: stopped > infrastructure > no_calls > timeout > limit, context > sandbox > exit > done."""
    if facts.stopped is not None:
        return facts.stopped
    ordered = (
        (facts.fault is not None, Termination.INFRASTRUCTURE),
        (facts.needs_calls and facts.calls == 0, Termination.NO_CALLS),
        (facts.timed_out, Termination.AGENT_TIMEOUT),
        (facts.limit, Termination.LIMIT),
        (facts.context, Termination.CONTEXT),
        (facts.sandbox_limit, Termination.SANDBOX_LIMIT),
        (facts.exit_code != 0, Termination.HARNESS_EXIT),
    )
    return next((termination for holds, termination in ordered if holds), Termination.DONE)
