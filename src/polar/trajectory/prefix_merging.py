"""Calls whose prompt keeps the whole of an earlier call become one trace; whatever keeps less starts a new one."""

from __future__ import annotations

from polar.records import BuildResult
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog
from polar.trajectory.assembly import assemble
from polar.trajectory.session import Session


class PrefixMerging:
    """Of siblings (calls that go on from the same answer, or from an equal prompt) the first extends its trace; to the
    others what they share is context, so that it is trained once."""

    def __init__(self, spec: StrategySpec) -> None:
        self.spec = spec

    def build(self, log: SessionLog, *, include_auxiliary: bool = False) -> BuildResult:
        """Raises BuildFault. Time and memory are linear in the ids of the log and of the traces."""
        session = Session(log, include_auxiliary=include_auxiliary)
        traces = [assemble(log, chain, session.sequence(chain[-1])) for chain in session.chains()]
        return session.result(traces)
