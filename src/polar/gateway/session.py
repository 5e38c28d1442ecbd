"""One attempt's life: INIT → RUN → BUILD → EVAL → end. However it ends, its key is dead, its sandbox is gone,
and there is one NodeResult that says what happened and whose fault it was."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

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
from polar.gateway.budgets import StageTimeout, milliseconds, never, timed, within
from polar.gateway.disk import Disk
from polar.gateway.environment import agent_environment
from polar.gateway.grading import grade
from polar.gateway.outbox import Outbox
from polar.gateway.outcome import Outcome
from polar.gateway.sandboxes import UNBOUNDED, Sandboxes
from polar.gateway.stages import Stages
from polar.harnesses import load_harness
from polar.nodeapi import GATEWAY_STOPPED, Lease, NodeResult
from polar.plugins import blamed_on
from polar.protocols import Builder, EvaluationContext, Evaluator, Harness, Runtime
from polar.proxy import Attempt, ModelProxy, RunRecord
from polar.records import BuildResult, SessionStatus, Termination, Trajectory
from polar.replay import spread
from polar.requests import RuntimeSpec, TaskRequest, budgets_of
from polar.runtimes import Launcher, prepare
from polar.sessionlog import LogWriter, read
from polar.trajectory import build, load_builder

log = structlog.get_logger("polar.gateway")
T = TypeVar("T")
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
    disk: Disk
    launcher: Launcher
    runtimes: frozenset[str]
    """names of those that this gateway offers"""


class Session:
    """One lease being carried out. `run` returns how it ended, also when it was lost: its log is kept all the same."""

    def __init__(self, lease: Lease, node: NodeFacts) -> None:
        self.lease = lease
        self.node = node
        self.task = TaskRequest.model_validate(lease.task)
        self.stage = SessionStatus.REGISTERED
        self.outcome = Outcome()
        self.log_path = node.outbox.log_path(lease.session_id, lease.attempt)
        self._budgets = budgets_of(self.task)
        self._spec = self.task.runtime or RuntimeSpec()
        self._running: asyncio.Task[None] | None = None
        self._sandboxes = Sandboxes(
            lease.session_id,
            lease.attempt,
            self._spec,
            root=node.sandboxes,
            default=node.default_runtime,
            launcher=node.launcher,
        )
        self._writer: LogWriter | None = None
        self._keyed = False
        self._closing: asyncio.Task[RunRecord] | None = None
        self._record = RunRecord()

    @property
    def id(self) -> tuple[str, int]:
        return self.lease.session_id, self.lease.attempt

    @property
    def sampled(self) -> int:
        return self.node.proxy.sampled(self.lease.key) if self._keyed else self._record.sampled

    def stop(self, why: str) -> None:
        """Ends the session now, in whatever stage it is. `why` is the server's word: cancelled, early_stop or lost.
        What has ended by itself keeps its end, though its sandbox may still be on its way out."""
        if self._running is not None and self._running.done():
            return
        if why == "lost":
            self.outcome.lost = True
        else:
            self.outcome.stopped = Termination(why)
        if self._running is not None:
            self._running.cancel()

    async def run(self) -> NodeResult:
        taken_at = time.monotonic()
        self.outcome.timing.register_to_init_queue_ms = milliseconds(self.lease.queued_seconds)
        self._running = asyncio.create_task(self._stages())
        if self.outcome.unwanted:
            self._running.cancel()
        try:
            await self._running
        except asyncio.CancelledError:
            if not self.outcome.unwanted:
                raise
        except PolarError as fault:
            self.outcome.fault = fault
        except OSError as error:
            self.outcome.fault = from_os_error(error, f"session {self.lease.session_id}")
        except Exception as bug:  # one session's bug must not end the others' gateway; it is named, and retried
            log.exception("bug in a session", session=self.lease.session_id)
            self.outcome.fault = ServerFault(f"{type(bug).__name__}: {bug}", name="bug")
        finally:
            self.node.disk.look()  # while what the session wrote is still there
            await self._clear()
        if not self.outcome.unwanted:
            self.outcome.fault = self.node.disk.fault(taken_at) or self.outcome.fault
        seconds = self.lease.queued_seconds + time.monotonic() - taken_at
        self.outcome.timing.e2e_ms = milliseconds(seconds)
        if self.outcome.lost:
            self.outcome.fault = ServerFault("the lease was lost: another attempt has the session", name="lease_lost")
        return self._result()

    def given_back(self) -> NodeResult:
        """How it ended, when the gateway was stopped while `run` ran."""
        unfinished = self._running is None or self._running.cancelled()
        if unfinished and not self.outcome.unwanted:
            self.outcome.fault = ServerFault(f"the gateway {self.node.node_id} was stopped", name=GATEWAY_STOPPED)
        return self._result()

    def _result(self) -> NodeResult:
        return self.outcome.result(
            session_id=self.lease.session_id,
            attempt=self.lease.attempt,
            node_id=self.node.node_id,
            epoch=self.node.epoch,
            evaluator=self.task.evaluator.strategy if self.task.evaluator else None,
            sampled=self._record.sampled,
        )

    async def _stages(self) -> None:
        async with self.node.stages.init.slot():
            self.stage = SessionStatus.INITIALIZING
            with timed(self.outcome.timing, "init_ms"):
                runtime, harness = await self._initialise()
        self.stage, self.outcome.termination = SessionStatus.READY, Termination.QUEUE
        waiting = time.monotonic()
        async with self.node.stages.run.slot(self._queue_patience()):
            self.outcome.timing.ready_queue_ms = milliseconds(time.monotonic() - waiting)
            self.stage = SessionStatus.RUNNING
            with timed(self.outcome.timing, "run_ms"):
                await self._run_harness(runtime, harness)
        if not TABLE[self.outcome.termination].builds:
            return
        async with self.node.stages.postrun.slot():
            with timed(self.outcome.timing, "postrun_ms"):
                await self._after_run(runtime, harness)

    def _queue_patience(self) -> Callable[[], float] | None:
        """Waiting in READY counts as waiting in the queue."""
        budget, paused, started = self._budgets.queue, self.node.proxy.paused_seconds, time.monotonic()
        if budget is None:
            return None
        end = started + budget - (self.outcome.timing.register_to_init_queue_ms or 0.0) / 1000 - paused()
        return lambda: end + paused() - time.monotonic()

    # INIT

    async def _initialise(self) -> tuple[Runtime, Harness]:
        self.outcome.termination = Termination.PREPARE
        self._check_runtime()
        harness: Harness = load_harness(self.task.agent)
        self._builder: Builder = load_builder(self.task.builder)
        self._evaluator: Evaluator | None = load_evaluator(self.task.evaluator) if self.task.evaluator else None
        self.outcome.termination = Termination.SANDBOX_START
        try:
            runtime = await self._within(self._budgets.init, "init", self._ready(harness))
        except StageTimeout as late:
            if self.outcome.termination is Termination.SANDBOX_START:
                raise SandboxFault(f"the sandbox did not come up: {late.message}", name="sandbox_start") from late
            raise TaskFault(f"preparing the sandbox took too long: {late.message}", name="prepare") from late
        return runtime, harness

    async def _ready(self, harness: Harness) -> Runtime:
        runtime = await self._sandboxes.start()
        await self._open_proxy(runtime)
        self.outcome.termination = Termination.PREPARE
        await self._prepare(runtime, harness)
        return runtime

    def _check_runtime(self) -> None:
        wanted = self._spec.backend
        if wanted is not None and wanted not in self.node.runtimes:
            raise TaskFault(f"this gateway does not offer the runtime {wanted!r}; start it with --runtime {wanted}")

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
        await prepare(runtime, self._spec.prepare, UNBOUNDED)
        with blamed_on(HarnessFault, "the harness's set-up"):
            await harness.setup(runtime)

    # RUN

    async def _run_harness(self, runtime: Runtime, harness: Harness) -> None:
        """Ends with every process in the sandbox dead and the key revoked; then the termination is decided."""
        self.outcome.termination = Termination.INFRASTRUCTURE
        if self._grades_afresh:
            self._sandboxes.warm()
        in_time = await self._in_time(self._steps(runtime, harness))
        await self._close_proxy()
        await runtime.kill_processes()
        facts = RunFacts(
            fault=self._record.fault,
            calls=self._record.calls,
            needs_calls=harness.makes_calls,
            timed_out=not in_time,
            limit=self._record.limit is not None,
            context=self._record.context,
            sandbox_limit=self.outcome.exit.limit_hit,
            exit_code=self.outcome.exit.exit_code,
        )
        self.outcome.killed, self.outcome.refusal = not in_time, self._record.refusal
        self.outcome.termination = self.outcome.run_termination = decide(facts)
        if facts.fault is not None:
            self.outcome.fault = PolarError(self._record.fault_message or facts.fault, name=facts.fault)

    @property
    def _grades_afresh(self) -> bool:
        asked = self.task.evaluator is not None and self.task.evaluator.refresh_runtime
        return asked and self._evaluator is not None and self._evaluator.needs_runtime

    async def _in_time(self, steps: Coroutine[Any, Any, None]) -> bool:
        try:
            await self._within(self._budgets.agent, "the agent", steps)
        except StageTimeout:
            return False
        return True

    async def _steps(self, runtime: Runtime, harness: Harness) -> None:
        with blamed_on(HarnessFault, "the harness's run_steps"):
            steps = harness.run_steps(self.task.instruction)
        for step in steps:
            self.outcome.exit = await runtime.run(step, timeout=UNBOUNDED)
            if self.outcome.exit.exit_code != 0:
                return

    async def _within(self, seconds: float, stage: str, work: Coroutine[Any, Any, T]) -> T:
        return await within(seconds, stage, work, self.node.proxy.paused_seconds)

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
        with timed(self.outcome.timing, "build_ms"):
            self.outcome.built = await self._build()
        if self._evaluator is None:
            return
        self.stage = SessionStatus.EVALUATING
        with timed(self.outcome.timing, "eval_ms"):
            await self._evaluate(runtime, self._evaluator, self.outcome.built)

    async def _collect(self, runtime: Runtime, harness: Harness) -> None:
        """The harness's own steps after its run; what fails there is logged and costs no trajectory."""
        try:
            await self._within(self._budgets.build, "postrun", self._postrun(runtime, harness))
        except (StageTimeout, HarnessFault) as fault:
            log.warning("postrun step failed", session=self.lease.session_id, why=fault.message)

    async def _postrun(self, runtime: Runtime, harness: Harness) -> None:
        with blamed_on(HarnessFault, "what the harness does after its run"):
            for step in harness.postrun_steps():
                await runtime.run(step, timeout=UNBOUNDED)
            await harness.postprocess(runtime, self.outcome.exit)

    async def _build(self) -> BuildResult:
        assert self._writer is not None
        self._writer.seal()
        decided, self.outcome.termination = self.outcome.termination, Termination.BUILD
        try:
            building = asyncio.to_thread(self._build_now, decided)
            built = await self._within(self._budgets.build, "build", building)
        except StageTimeout as late:
            raise BuildFault(late.message) from late
        self.outcome.termination = decided
        return built

    def _build_now(self, ended: Termination) -> BuildResult:
        log = read(self.log_path)
        return build(self._builder, log, TABLE[ended], include_auxiliary=self.task.include_auxiliary)

    async def _evaluate(self, runtime: Runtime, evaluator: Evaluator, built: BuildResult) -> None:
        assert self.task.evaluator is not None
        status = TABLE[self.outcome.termination].status

        async def context() -> EvaluationContext:
            if self._grades_afresh:
                sandbox = await self._sandboxes.fresh()
            else:
                sandbox = runtime
                await runtime.kill_processes()
            return EvaluationContext(
                task=self.task,
                session_id=self.lease.session_id,
                status=status,
                termination=self.outcome.termination,
                trajectory=Trajectory(status=status, traces=built.traces),
                runtime=sandbox if evaluator.needs_runtime else None,
                timeout=UNBOUNDED,
            )

        try:
            self.outcome.evaluation = await grade(
                evaluator, self._budgets.evaluate, context, self.node.proxy.paused_seconds
            )
        except EvaluationFault as fault:
            if self.outcome.termination in EVALUATION_REPLACES:
                self.outcome.termination, self.outcome.fault = Termination.EVALUATION, fault
            return
        spread(self.outcome.evaluation, built.traces)

    # end

    async def _clear(self) -> None:
        """Key, sandboxes and log; shielded, so that a second Ctrl-C leaves nothing behind."""
        await asyncio.shield(self._clear_now())

    async def _clear_now(self) -> None:
        try:
            await within(_CLEAN_UP_SECONDS, "clearing up", self._let_go(), never)
        except Exception:  # the gateway's next start sweeps it; the other sessions go on
            log.exception("not cleared up", session=self.lease.session_id)
        if self._writer is not None:
            self._seal(self._writer)

    async def _let_go(self) -> None:
        await self._close_proxy()
        await self._sandboxes.close()

    def _seal(self, writer: LogWriter) -> None:
        try:
            writer.seal()
        except (ServerFault, OSError) as error:
            writer.close()
            self.outcome.fault = from_os_error(error, "sealing the log") if isinstance(error, OSError) else error
