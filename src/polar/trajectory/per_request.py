"""Every trainable call is a trace of its own, with its whole prompt as context."""

from __future__ import annotations

from polar.records import BuildResult, Trace
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog
from polar.trajectory.assembly import assemble
from polar.trajectory.session import Session


class PerRequest:
    """Prompts of one chain are views of one array: in memory a long session costs its tokens once, not once a turn."""

    def __init__(self, spec: StrategySpec) -> None:
        self.spec = spec

    def build(self, log: SessionLog, *, include_auxiliary: bool = False) -> BuildResult:
        """Raises BuildFault. Memory is linear in the ids of the log, time in those of the traces (the audit's)."""
        session = Session(log, include_auxiliary=include_auxiliary)
        traces: dict[int, Trace] = {}
        for chain in session.chains(unbroken=True):
            sequence = session.sequence(chain[-1])
            traces |= {call.number: assemble(log, [call], sequence) for call in chain}
        return session.result([traces[number] for number in sorted(traces)])
