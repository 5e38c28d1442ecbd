"""What is known of an attempt's end, from its first moment on: whenever it is asked, it names one ending."""

from __future__ import annotations

import msgspec

from polar.endings import TABLE
from polar.errors import BuildFault, EvaluationFault, HarnessFault, PolarError, SandboxFault, TaskFault
from polar.gateway.budgets import StageTimeout
from polar.nodeapi import NodeResult
from polar.protocols import ExecResult
from polar.records import BuildResult, EvaluationResult, SessionTiming, Termination

_LOG_TAIL = 4000


class Outcome(msgspec.Struct, kw_only=True):
    termination: Termination = Termination.INFRASTRUCTURE
    """what it would be called if it ended now without a fault"""
    run_termination: Termination | None = None
    """what RUN ended with"""
    stopped: Termination | None = None
    """CANCELLED or EARLY_STOP, from when the server said so"""
    lost: bool = False
    """another attempt has the session"""
    fault: PolarError | None = None
    exit: ExecResult = msgspec.field(default_factory=lambda: ExecResult(exit_code=0))
    killed: bool = False
    """the harness still ran at the end of its budget: it has no exit code"""
    refusal: str | None = None
    """what the last refused model call was told"""
    built: BuildResult | None = None
    evaluation: EvaluationResult | None = None
    timing: SessionTiming = msgspec.field(default_factory=SessionTiming)

    @property
    def unwanted(self) -> bool:
        return self.lost or self.stopped is not None

    def result(
        self, *, session_id: str, attempt: int, node_id: str, epoch: int, evaluator: str | None, sampled: int
    ) -> NodeResult:
        termination = self._named()
        ending = TABLE[termination]
        built = self.built if ending.builds else None
        return NodeResult(
            session_id=session_id,
            attempt=attempt,
            node_id=node_id,
            epoch=epoch,
            status=ending.status,
            termination=termination,
            retryable=ending.retried,
            fault=self.fault.name if self.fault else None,
            error=self.fault.message if self.fault else self._silence(termination),
            exit_code=self.exit.exit_code if self.run_termination and not self.killed else None,
            traces=built.traces if built else None,
            run_termination=self.run_termination,
            tokens=built.tokens if built else None,
            calls=built.calls if built else None,
            evaluation=self.evaluation if built else None,
            evaluator=evaluator,
            timing=self.timing,
            sampled_tokens=sampled,
            harness_log=(self.exit.output + self.exit.errors)[-_LOG_TAIL:],
        )

    def _named(self) -> Termination:
        """What was decided, unless a fault ended the session before a decision."""
        fault = self.fault
        if self.lost:
            return Termination.INFRASTRUCTURE
        if self.stopped is not None:
            return self.stopped
        if fault is None or isinstance(fault, BuildFault | EvaluationFault | StageTimeout):
            return self.termination
        if isinstance(fault, TaskFault | HarnessFault):
            return Termination.PREPARE
        at_start = isinstance(fault, SandboxFault) and self.termination is Termination.SANDBOX_START
        return Termination.SANDBOX_START if at_start else Termination.INFRASTRUCTURE

    def _silence(self, termination: Termination) -> str | None:
        """Of a session without a call: what the model's side said, else the harness, which may say why."""
        if termination is not Termination.NO_CALLS:
            return None
        if self.refusal is not None:
            return f"no model call reached the engine; the last was refused: {self.refusal}"
        last = (self.exit.errors or self.exit.output).strip().splitlines()[-1:]
        end = "still ran when its time was up" if self.killed else f"ended with exit code {self.exit.exit_code}"
        return f"no model call; the harness {end}: {' '.join(last) or 'no output'}"
