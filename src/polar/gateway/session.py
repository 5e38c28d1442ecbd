"""One attempt's life: INIT → RUN → BUILD → EVAL → end. However it ends, its key is dead, its sandbox is gone,
and there is one NodeResult that says what happened and whose fault it was."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import msgspec
import structlog

from polar.endings import EVALUATION_REPLACES, TABLE, RunFacts, decide
from polar.errors import (
    BuildFault,
    EvaluationFault,
    HarnessFault,
    PolarError,
    SandboxFault,
    ServerFault,
    TaskFault,
    from_os_error,
)
from polar.evaluators import load_evaluator
from polar.gateway.budgets import StageTimeout, budget, finished_within, milliseconds, timed
from polar.gateway.environment import agent_environment
from polar.gateway.grading import grade
from polar.gateway.outbox import Outbox
from polar.gateway.stages import Stages
from polar.harnesses import load_harness
from polar.nodeapi import Lease, NodeResult
from polar.plugins import blamed_on
from polar.protocols import Builder, EvaluationContext, Evaluator, ExecResult, Harness, Place, Runtime
from polar.proxy import Attempt, ModelProxy, RunRecord
from polar.records import BuildResult, EvaluationResult, SessionStatus, SessionTiming, Termination, Trajectory
from polar.replay import spread
from polar.requests import RuntimeSpec, TaskRequest, budgets_of
from polar.runtimes import Launcher, load_runtime, prepare
from polar.sessionlog import LogWriter, read
from polar.trajectory import build, load_builder

log = structlog.get_logger("polar.gateway")

_UNBOUNDED = 1e8
"""seconds; where the stage's own clock is what ends a command"""
_LOG_TAIL = 4000
_CLEAN_UP_SECONDS = 60.0


class NodeFacts(msgspec.Struct, kw_only=True, frozen=True):
    """What every session of a gateway shares."""

    node_id: str
    epoch: int
    sandboxes: Path
    default_runtime: str | None
    stages: Stages
    proxy: ModelProxy
    outbox: Outbox
    launcher: Launcher
    runtimes: frozenset[str]
    """names of those that this gateway offers"""


class Session:
    """One lease being carried out. `run` returns its result, or None when it was lost (another attempt owns it)."""

    def __init__(self, lease: Lease, node: NodeFacts) -> None:
        self.lease = lease
        self.node = node
        self.task = TaskRequest.model_validate(lease.task)
        self.stage = SessionStatus.REGISTERED
        self.log_path = node.outbox.log_path(lease.session_id, lease.attempt)
        self._budgets = budgets_of(self.task)
        self._spec = self.task.runtime or RuntimeSpec()
        self._stopped: Termination | None = None
        self._lost = False
        self._running: asyncio.Task[None] | None = None
        self._runtimes: list[Runtime] = []
        self._writer: LogWriter | None = None
        self._keyed = False
        self._closing: asyncio.Task[RunRecord] | None = None
        self._timing = SessionTiming()
        self._record = RunRecord()
        self._exit = ExecResult(exit_code=0)
        self._run_termination: Termination | None = None
        self._termination = Termination.INFRASTRUCTURE
        """what it would be called if it ended now"""
        self._fault: PolarError | None = None
        self._built: BuildResult | None = None
        self._evaluation: EvaluationResult | None = None

    @property
    def id(self) -> tuple[str, int]:
        return self.lease.session_id, self.lease.attempt

    @property
    def sampled(self) -> int:
        return self.node.proxy.sampled(self.lease.key) if self._keyed else self._record.sampled

    def stop(self, why: str) -> None:
        """Ends the session now, in whatever stage it is. `why` is the server's word: cancelled, early_stop or lost."""
        if why == "lost":
            self._lost = True
        else:
            self._stopped = Termination(why)
        if self._running is not None:
            self._running.cancel()

    async def run(self) -> NodeResult | None:
        self._timing.register_to_init_queue_ms = milliseconds(time.time() - self.lease.registered_at)
        self._running = asyncio.create_task(self._stages())
        if self._stopped or self._lost:
            self._running.cancel()
        try:
            await self._running
        except asyncio.CancelledError:
            if not (self._stopped or self._lost):
                raise
        except PolarError as fault:
            self._fault = fault
        except OSError as error:
            self._fault = from_os_error(error, f"session {self.lease.session_id}")
        except Exception as bug:  # one session's bug must not end the others' gateway; it is named, and retried
            log.exception("bug in a session", session=self.lease.session_id)
            self._fault = ServerFault(f"{type(bug).__name__}: {bug}", name="bug")
        finally:
            await self._clear()
        self._timing.e2e_ms = milliseconds(time.time() - self.lease.registered_at)
        return None if self._lost else self._result()

    async def _stages(self) -> None:
        async with self.node.stages.init.slot():
            self.stage = SessionStatus.INITIALIZING
            with timed(self._timing, "init_ms"):
                runtime, harness = await self._initialise()
        self.stage = SessionStatus.READY
        waiting = time.monotonic()
        async with self.node.stages.run.slot():
            self._timing.ready_queue_ms = milliseconds(time.monotonic() - waiting)
            self.stage = SessionStatus.RUNNING
            with timed(self._timing, "run_ms"):
                await self._run_harness(runtime, harness)
        if not TABLE[self._termination].builds:
            return
        async with self.node.stages.postrun.slot():
            with timed(self._timing, "postrun_ms"):
                await self._after_run(runtime, harness)

    # INIT

    async def _initialise(self) -> tuple[Runtime, Harness]:
        self._termination = Termination.PREPARE
        self._check_runtime()
        harness: Harness = load_harness(self.task.agent)
        self._builder: Builder = load_builder(self.task.builder)
        self._evaluator: Evaluator | None = load_evaluator(self.task.evaluator) if self.task.evaluator else None
        self._termination = Termination.SANDBOX_START
        try:
            async with budget(self._budgets.init, "init"):
                runtime = await self._sandbox(self.lease.session_id)
                await self._open_proxy(runtime)
                self._termination = Termination.PREPARE
                await self._prepare(runtime, harness)
        except StageTimeout as late:
            if self._termination is Termination.SANDBOX_START:
                raise SandboxFault(f"the sandbox did not come up: {late.message}", name="sandbox_start") from late
            raise TaskFault(f"preparing the sandbox took too long: {late.message}", name="prepare") from late
        return runtime, harness

    def _check_runtime(self) -> None:
        wanted = self._spec.backend
        if wanted is not None and wanted not in self.node.runtimes:
            raise TaskFault(f"this gateway does not offer the runtime {wanted!r}; start it with --runtime {wanted}")

    async def _sandbox(self, label: str) -> Runtime:
        runtime: Runtime = load_runtime(self._spec, self.node.default_runtime, self.node.launcher)
        self._runtimes.append(runtime)
        folder = self.node.sandboxes / f"{label}.{self.lease.attempt}"
        await runtime.start(Place(session_id=label, attempt=self.lease.attempt, folder=folder))
        return runtime

    async def _open_proxy(self, runtime: Runtime) -> None:
        proxy, lease = self.node.proxy, self.lease
        names: dict[str, Any] = {"session_id": lease.session_id, "task_id": self.task.task_id, "attempt": lease.attempt}
        header = proxy.header(**names, session_index=lease.session_index, task=self.task)
        self._writer = LogWriter(self.log_path, header)
        proxy.open(Attempt(**names, session_index=lease.session_index, key=lease.key, task=self.task, log=self._writer))
        self._keyed = True
        listener = await runtime.listen()
        await proxy.listen(lease.key, listener.sock)
        runtime.env |= agent_environment(self.task, lease.session_id, listener.url, lease.key)

    async def _prepare(self, runtime: Runtime, harness: Harness) -> None:
        await runtime.write(f"{runtime.session_dir}/instruction.txt", self.task.instruction.encode())
        await prepare(runtime, self._spec.prepare, self._budgets.init)
        with blamed_on(HarnessFault, "the harness's set-up"):
            await harness.setup(runtime)

    # RUN

    async def _run_harness(self, runtime: Runtime, harness: Harness) -> None:
        """Ends with every process in the sandbox dead and the key revoked; then the termination is decided."""
        self._termination = Termination.INFRASTRUCTURE
        steps = self._steps(runtime, harness)
        in_time = await finished_within(steps, self._budgets.agent, self.node.proxy.paused_seconds)
        await self._close_proxy()
        await runtime.kill_processes()
        facts = RunFacts(
            fault=self._record.fault,
            completions=self._record.completions,
            needs_calls=harness.makes_calls,
            timed_out=not in_time,
            limit=self._record.limit is not None,
            context=self._record.context,
            sandbox_limit=self._exit.limit_hit,
            exit_code=self._exit.exit_code,
        )
        self._termination = self._run_termination = decide(facts)
        if facts.fault is not None:
            self._fault = PolarError(self._record.fault_message or facts.fault, name=facts.fault)

    async def _steps(self, runtime: Runtime, harness: Harness) -> None:
        for step in harness.run_steps(self.task.instruction):
            self._exit = await runtime.run(step, timeout=_UNBOUNDED)
            if self._exit.exit_code != 0:
                return

    async def _close_proxy(self) -> None:
        """Whoever asks first starts it; it goes on to its end also when the session is cancelled meanwhile."""
        if self._keyed:
            self._keyed = False
            self._closing = asyncio.create_task(self.node.proxy.close(self.lease.key))
        if self._closing is not None:
            self._record = await asyncio.shield(self._closing)

    # BUILD and EVAL

    async def _after_run(self, runtime: Runtime, harness: Harness) -> None:
        self.stage = SessionStatus.POST_RUN
        await self._collect(runtime, harness)
        self.stage = SessionStatus.BUILDING
        with timed(self._timing, "build_ms"):
            self._built = await self._build()
        if self._evaluator is None:
            return
        self.stage = SessionStatus.EVALUATING
        with timed(self._timing, "eval_ms"):
            await self._evaluate(runtime, self._evaluator, self._built)

    async def _collect(self, runtime: Runtime, harness: Harness) -> None:
        """The harness's own steps after its run; what fails there is logged and costs no trajectory."""
        try:
            async with budget(self._budgets.build, "postrun"):
                for step in harness.postrun_steps():
                    await runtime.run(step, timeout=_UNBOUNDED)
                with blamed_on(HarnessFault, "the harness's postprocess"):
                    await harness.postprocess(runtime, self._exit)
        except (StageTimeout, HarnessFault) as fault:
            log.warning("postrun step failed", session=self.lease.session_id, why=fault.message)

    async def _build(self) -> BuildResult:
        assert self._writer is not None
        self._writer.seal()
        decided, self._termination = self._termination, Termination.BUILD
        try:
            async with budget(self._budgets.build, "build"):
                built = await asyncio.to_thread(self._build_now, decided)
        except StageTimeout as late:
            raise BuildFault(late.message) from late
        self._termination = decided
        return built

    def _build_now(self, ended: Termination) -> BuildResult:
        log = read(self.log_path)
        return build(self._builder, log, TABLE[ended], include_auxiliary=self.task.include_auxiliary)

    async def _evaluate(self, runtime: Runtime, evaluator: Evaluator, built: BuildResult) -> None:
        assert self.task.evaluator is not None
        status = TABLE[self._termination].status
        fresh = self.task.evaluator.refresh_runtime

        async def context() -> EvaluationContext:
            await runtime.kill_processes()
            sandbox = await self._fresh_sandbox() if fresh and evaluator.needs_runtime else runtime
            return EvaluationContext(
                task=self.task,
                session_id=self.lease.session_id,
                status=status,
                termination=self._termination,
                trajectory=Trajectory(status=status, traces=built.traces),
                runtime=sandbox if evaluator.needs_runtime else None,
                timeout=self._budgets.evaluate,
            )

        try:
            self._evaluation = await grade(evaluator, self._budgets.evaluate, context)
        except EvaluationFault as fault:
            if self._termination in EVALUATION_REPLACES:
                self._termination, self._fault = Termination.EVALUATION, fault
            return
        spread(self._evaluation, built.traces)

    async def _fresh_sandbox(self) -> Runtime:
        runtime = await self._sandbox(f"{self.lease.session_id}.eval{len(self._runtimes)}")
        actions = self._spec.prepare if self._spec.eval_prepare is None else self._spec.eval_prepare
        await prepare(runtime, actions, self._budgets.evaluate)
        return runtime

    # end

    async def _clear(self) -> None:
        """Key, sandboxes and log; shielded, so that a second Ctrl-C leaves nothing behind."""
        await asyncio.shield(self._clear_now())

    async def _clear_now(self) -> None:
        try:
            async with budget(_CLEAN_UP_SECONDS, "clearing up"):
                await self._close_proxy()
                await asyncio.gather(*(runtime.stop() for runtime in self._runtimes))
        except (PolarError, OSError) as error:  # the gateway's next start sweeps it; the other sessions go on
            log.error("not cleared up", session=self.lease.session_id, why=str(error))
        if self._writer is not None:
            self._seal(self._writer)

    def _seal(self, writer: LogWriter) -> None:
        try:
            writer.seal()
        except (ServerFault, OSError) as error:
            writer.close()
            self._fault = from_os_error(error, "sealing the log") if isinstance(error, OSError) else error

    def _result(self) -> NodeResult:
        termination = self._named_termination()
        ending = TABLE[termination]
        built = self._built if ending.builds else None
        return NodeResult(
            session_id=self.lease.session_id,
            attempt=self.lease.attempt,
            node_id=self.node.node_id,
            epoch=self.node.epoch,
            status=ending.status,
            termination=termination,
            retryable=ending.retried,
            fault=self._fault.name if self._fault else None,
            error=self._fault.message if self._fault else self._silence(termination),
            exit_code=self._exit.exit_code if self._run_termination else None,
            traces=built.traces if built else None,
            run_termination=self._run_termination,
            tokens=built.tokens if built else None,
            calls=built.calls if built else None,
            evaluation=self._evaluation,
            evaluator=self.task.evaluator.strategy if self.task.evaluator else None,
            timing=self._timing,
            harness_log=(self._exit.output + self._exit.errors)[-_LOG_TAIL:],
        )

    def _silence(self, termination: Termination) -> str | None:
        """A harness that never called its model says itself why, if anybody does."""
        if termination is not Termination.NO_CALLS:
            return None
        last = (self._exit.errors or self._exit.output).strip().splitlines()[-1:]
        return (
            f"no model call; the harness ended with exit code {self._exit.exit_code}: {' '.join(last) or 'no output'}"
        )

    def _named_termination(self) -> Termination:
        """What was decided, unless a fault ended the session before a decision."""
        fault = self._fault
        if self._stopped is not None:
            return self._stopped
        if fault is None or isinstance(fault, BuildFault | EvaluationFault):
            return self._termination
        if isinstance(fault, TaskFault | HarnessFault):
            return Termination.PREPARE
        at_start = isinstance(fault, SandboxFault) and self._termination is Termination.SANDBOX_START
        return Termination.SANDBOX_START if at_start else Termination.INFRASTRUCTURE
