"""One attempt's life: INIT → RUN → BUILD → EVAL → end. However it ends, its key is dead, its sandbox is gone,
and there is one NodeResult that says what happened and whose fault it was."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
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
from polar.gateway.environment import agent_environment
from polar.gateway.outbox import Outbox
from polar.gateway.stages import Stages
from polar.harnesses import load_harness
from polar.nodeapi import Lease, NodeResult
from polar.protocols import Builder, EvaluationContext, Evaluator, ExecResult, Harness, Place, Runtime
from polar.proxy import Attempt, ModelProxy, RunRecord
from polar.records import (
    BuildResult,
    EvaluationResult,
    SessionStatus,
    SessionTiming,
    Termination,
    Trajectory,
)
from polar.requests import RuntimeSpec, TaskRequest, budgets_of
from polar.runtimes import load_runtime, prepare
from polar.sessionlog import LogWriter, read
from polar.trajectory import load_builder

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


class StageTimeout(PolarError):
    """A stage used its budget up; what that means is the stage's to say."""

    default_name = "budget"


class Session:
    """One lease being carried out. `run` returns its result, or None when it was lost (another attempt owns it)."""

    def __init__(self, lease: Lease, node: NodeFacts) -> None:
        self.lease = lease
        self.node = node
        self.task = TaskRequest.model_validate(lease.task)
        self.budgets = budgets_of(self.task)
        self.stage = SessionStatus.REGISTERED
        self.stopped: Termination | None = None
        self.lost = False
        self._builder: Builder | None = None
        self._evaluator: Evaluator | None = None
        self._running: asyncio.Task[None] | None = None
        self._runtimes: list[Runtime] = []
        self._writer: LogWriter | None = None
        self._keyed = False
        self._timing = SessionTiming()
        self._record = RunRecord()
        self._exit = ExecResult(exit_code=0)
        self._run_status: SessionStatus | None = None
        self._termination = Termination.INFRASTRUCTURE
        self._fault: PolarError | None = None
        self._built: BuildResult | None = None
        self._evaluation: EvaluationResult | None = None

    @property
    def id(self) -> tuple[str, int]:
        return self.lease.session_id, self.lease.attempt

    @property
    def log_path(self) -> Path:
        return self.node.outbox.log_path(*self.id)

    @property
    def sampled(self) -> int:
        return self.node.proxy.sampled(self.lease.key) if self._keyed else self._record.sampled

    def stop(self, why: str) -> None:
        """Ends the session now, in whatever stage it is. `why` is the server's word: cancelled, early_stop or lost."""
        if why == "lost":
            self.lost = True
        else:
            self.stopped = Termination(why)
        if self._running is not None:
            self._running.cancel()

    async def run(self) -> NodeResult | None:
        started = time.time()
        self._timing.register_to_init_queue_ms = _milliseconds(started - self.lease.registered_at)
        self._running = asyncio.create_task(self._stages())
        if self.stopped or self.lost:
            self._running.cancel()
        try:
            await self._running
        except asyncio.CancelledError:
            if not (self.stopped or self.lost):
                raise
            self._termination = self.stopped or Termination.CANCELLED
        except PolarError as fault:
            self._fault = fault
        except OSError as error:
            self._fault = from_os_error(error, f"session {self.lease.session_id}")
        except Exception as bug:  # one session's bug must not end the others' gateway; it is named, and retried
            log.exception("bug in a session", session=self.lease.session_id)
            self._fault = ServerFault(f"{type(bug).__name__}: {bug}", name="bug")
        finally:
            await self._clear()
        self._timing.e2e_ms = _milliseconds(time.time() - self.lease.registered_at)
        return None if self.lost else self._result()

    async def _stages(self) -> None:
        async with self.node.stages.init.slot():
            self.stage = SessionStatus.INITIALIZING
            with _Clock(self._timing, "init_ms"):
                runtime, harness = await self._initialise()
        self.stage = SessionStatus.READY
        waiting = time.monotonic()
        async with self.node.stages.run.slot():
            self._timing.ready_queue_ms = _milliseconds(time.monotonic() - waiting)
            self.stage = SessionStatus.RUNNING
            with _Clock(self._timing, "run_ms"):
                await self._run_harness(runtime, harness)
        if not TABLE[self._termination].builds:
            return
        async with self.node.stages.postrun.slot():
            with _Clock(self._timing, "postrun_ms"):
                await self._after_run(runtime, harness)

    # INIT

    async def _initialise(self) -> tuple[Runtime, Harness]:
        self._termination = Termination.PREPARE
        harness: Harness = load_harness(self.task.agent)
        self._builder = load_builder(self.task.builder)
        self._evaluator = load_evaluator(self.task.evaluator) if self.task.evaluator else None
        self._termination = Termination.SANDBOX_START
        try:
            async with _budget(self.budgets.init, "init"):
                runtime = await self._sandbox(self.lease.session_id)
                await self._open_proxy(runtime)
                self._termination = Termination.PREPARE
                await self._prepare(runtime, harness)
        except StageTimeout as late:
            if self._termination is Termination.SANDBOX_START:
                raise SandboxFault(f"the sandbox did not come up: {late.message}", name="sandbox_start") from late
            raise TaskFault(f"preparing the sandbox took too long: {late.message}", name="prepare") from late
        return runtime, harness

    async def _sandbox(self, label: str) -> Runtime:
        runtime: Runtime = load_runtime(self.task.runtime or RuntimeSpec(), self.node.default_runtime)
        self._runtimes.append(runtime)
        folder = self.node.sandboxes / f"{label}.{self.lease.attempt}"
        await runtime.start(Place(session_id=label, attempt=self.lease.attempt, folder=folder))
        return runtime

    async def _open_proxy(self, runtime: Runtime) -> None:
        proxy, lease = self.node.proxy, self.lease
        attempt = Attempt(
            session_id=lease.session_id,
            task_id=self.task.task_id,
            attempt=lease.attempt,
            session_index=lease.session_index,
            key=lease.key,
            task=self.task,
            log=self._open_log(),
        )
        proxy.open(attempt)
        self._keyed = True
        listener = await runtime.listen()
        await proxy.listen(lease.key, listener.sock)
        runtime.env |= agent_environment(self.task, lease.session_id, listener.url, lease.key)

    def _open_log(self) -> LogWriter:
        lease = self.lease
        header = self.node.proxy.header(
            session_id=lease.session_id,
            task_id=self.task.task_id,
            attempt=lease.attempt,
            session_index=lease.session_index,
            task=self.task,
        )
        self._writer = LogWriter(self.log_path, header)
        return self._writer

    async def _prepare(self, runtime: Runtime, harness: Harness) -> None:
        await runtime.write(f"{runtime.session_dir}/instruction.txt", self.task.instruction.encode())
        if self.task.runtime:
            await prepare(runtime, self.task.runtime.prepare, self.budgets.init)
        with _blamed_on(HarnessFault, "the harness's set-up"):
            await harness.setup(runtime)

    # RUN

    async def _run_harness(self, runtime: Runtime, harness: Harness) -> None:
        """Ends with every process in the sandbox dead and the key revoked; then the termination is decided."""
        self._termination = Termination.INFRASTRUCTURE
        timed_out = not await self._within_agent_budget(self._steps(runtime, harness))
        await self._end_run(runtime)
        facts = RunFacts(
            fault=self._record.fault,
            completions=self._record.completions,
            needs_calls=harness.makes_calls,
            timed_out=timed_out,
            limit=self._record.limit is not None,
            context=self._record.context,
            sandbox_limit=self._exit.limit_hit,
            exit_code=self._exit.exit_code,
        )
        self._termination = decide(facts)
        self._run_status = TABLE[self._termination].status
        if facts.fault is not None:
            self._fault = PolarError(self._record.fault_message or facts.fault, name=facts.fault)

    async def _steps(self, runtime: Runtime, harness: Harness) -> None:
        for step in harness.run_steps(self.task.instruction):
            self._exit = await runtime.run(step, timeout=_UNBOUNDED)
            if self._exit.exit_code != 0:
                return

    async def _within_agent_budget(self, work: Coroutine[Any, Any, None]) -> bool:
        """False when the budget was spent. Time in which the proxy is paused is not counted."""
        proxy, started = self.node.proxy, time.monotonic()
        paused_before = proxy.paused_seconds()
        task = asyncio.create_task(work)
        try:
            while not task.done():
                spent = time.monotonic() - started - (proxy.paused_seconds() - paused_before)
                left = self.budgets.agent - spent
                if left <= 0:
                    return False
                await asyncio.wait({task}, timeout=left)
            await task
            return True
        finally:
            await _cancelled(task)

    async def _end_run(self, runtime: Runtime) -> None:
        self._keyed = False
        self._record = await self.node.proxy.close(self.lease.key)
        await runtime.kill_processes()

    # BUILD and EVAL

    async def _after_run(self, runtime: Runtime, harness: Harness) -> None:
        self.stage = SessionStatus.POST_RUN
        await self._collect(runtime, harness)
        self.stage = SessionStatus.BUILDING
        with _Clock(self._timing, "build_ms"):
            self._built = await self._build()
        if self.task.evaluator is None:
            return
        self.stage = SessionStatus.EVALUATING
        with _Clock(self._timing, "eval_ms"):
            await self._evaluate(runtime, self._built)

    async def _collect(self, runtime: Runtime, harness: Harness) -> None:
        """The harness's own steps after its run; what fails there is logged and costs no trajectory."""
        steps = harness.postrun_steps()
        try:
            async with _budget(self.budgets.build, "postrun"):
                for step in steps:
                    await runtime.run(step, timeout=_UNBOUNDED)
                with _blamed_on(HarnessFault, "the harness's postprocess"):
                    await harness.postprocess(runtime, self._exit)
        except (StageTimeout, HarnessFault) as fault:
            log.warning("postrun step failed", session=self.lease.session_id, why=fault.message)
        if steps:
            await runtime.kill_processes()

    async def _build(self) -> BuildResult:
        assert self._writer is not None
        self._writer.seal()
        decided, self._termination = self._termination, Termination.BUILD
        try:
            async with _budget(self.budgets.build, "build"):
                with _blamed_on(BuildFault, "the builder"):
                    built = await asyncio.to_thread(self._build_now, self._writer.path)
        except StageTimeout as late:
            raise BuildFault(late.message) from late
        self._termination = decided
        finish = TABLE[self._termination].forced_finish
        if finish and built.traces:
            built.traces[-1].finish_reason = finish
        return built

    def _build_now(self, path: Path) -> BuildResult:
        assert self._builder is not None
        return self._builder.build(read(path), include_auxiliary=self.task.include_auxiliary)

    async def _evaluate(self, runtime: Runtime, built: BuildResult) -> None:
        try:
            evaluation = await self._evaluate_twice(runtime, built)
        except EvaluationFault as fault:
            if self._termination in EVALUATION_REPLACES:
                self._termination, self._fault = Termination.EVALUATION, fault
            return
        self._evaluation = evaluation
        _spread(evaluation, built)

    async def _evaluate_twice(self, runtime: Runtime, built: BuildResult) -> EvaluationResult:
        try:
            return await self._evaluate_once(runtime, built)
        except EvaluationFault as first:
            log.warning("evaluation failed, once more", session=self.lease.session_id, why=first.message)
            await runtime.kill_processes()
            return await self._evaluate_once(runtime, built)

    async def _evaluate_once(self, runtime: Runtime, built: BuildResult) -> EvaluationResult:
        evaluator = self._evaluator
        assert evaluator is not None and self.task.evaluator is not None
        status = self._run_status or SessionStatus.COMPLETED
        try:
            async with _budget(self.budgets.evaluate, "evaluate"):
                if self.task.evaluator.refresh_runtime and evaluator.needs_runtime:
                    runtime = await self._fresh_sandbox()
                context = EvaluationContext(
                    task=self.task,
                    session_id=self.lease.session_id,
                    status=status,
                    termination=self._termination,
                    trajectory=Trajectory(status=status, traces=built.traces),
                    runtime=runtime if evaluator.needs_runtime else None,
                    timeout=self.budgets.evaluate,
                )
                with _blamed_on(EvaluationFault, "the evaluator"):
                    result = await evaluator.evaluate(context)
        except (StageTimeout, SandboxFault, TaskFault) as fault:
            raise EvaluationFault(fault.message) from fault
        _check_rewards(result, len(built.traces))
        return result

    async def _fresh_sandbox(self) -> Runtime:
        runtime = await self._sandbox(f"{self.lease.session_id}.eval{len(self._runtimes)}")
        spec = self.task.runtime or RuntimeSpec()
        actions = spec.prepare if spec.eval_prepare is None else spec.eval_prepare
        await prepare(runtime, actions, self.budgets.evaluate)
        return runtime

    # end

    async def _clear(self) -> None:
        """Key, log and sandboxes; shielded, so that a second Ctrl-C leaves nothing behind."""
        await asyncio.shield(asyncio.wait_for(self._clear_all(), _CLEAN_UP_SECONDS))

    async def _clear_all(self) -> None:
        if self._keyed:
            self._keyed = False
            self._record = await self.node.proxy.close(self.lease.key)
        for runtime in self._runtimes:
            await runtime.stop()
        if self._writer is not None:
            self._seal()

    def _seal(self) -> None:
        assert self._writer is not None
        try:
            self._writer.seal()
        except PolarError as fault:
            self._writer.close()
            self._fault = self._fault or fault

    def _result(self) -> NodeResult:
        termination, fault = self._termination, self._fault
        if isinstance(fault, TaskFault | HarnessFault):
            termination = Termination.PREPARE if termination is not Termination.BUILD else termination
        elif fault is not None and fault.retryable:
            at_start = isinstance(fault, SandboxFault) and termination is Termination.SANDBOX_START
            termination = termination if at_start else Termination.INFRASTRUCTURE
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
            fault=fault.name if fault else None,
            error=fault.message if fault else None,
            exit_code=self._exit.exit_code if self._run_status else None,
            traces=built.traces if built else None,
            run_status=self._run_status,
            tokens=built.tokens if built else None,
            calls=built.calls if built else None,
            evaluation=self._evaluation,
            evaluator=self.task.evaluator.strategy if self.task.evaluator else None,
            timing=self._timing,
            harness_log=(self._exit.output + self._exit.errors)[-_LOG_TAIL:],
        )


class _Clock:
    """Adds the milliseconds of a block to one field of the timing, also when the block fails."""

    def __init__(self, timing: SessionTiming, field: str) -> None:
        self._timing, self._field = timing, field

    def __enter__(self) -> None:
        self._started = time.monotonic()

    def __exit__(self, *exception: object) -> None:
        setattr(self._timing, self._field, _milliseconds(time.monotonic() - self._started))


@asynccontextmanager
async def _budget(seconds: float, stage: str) -> AsyncIterator[None]:
    """Raises StageTimeout when the block takes longer."""
    try:
        async with asyncio.timeout(seconds) as clock:
            yield
    except TimeoutError as late:
        if clock.expired():
            raise StageTimeout(f"the budget of {stage}, {seconds:g} s, is spent") from late
        raise


@contextmanager
def _blamed_on(fault: type[PolarError], whose: str) -> Iterator[None]:
    """A plug-in's own exception becomes the fault of whoever wrote it; our faults pass."""
    try:
        yield
    except (PolarError, OSError):
        raise
    except Exception as error:
        raise fault(f"{whose} raised {type(error).__name__}: {error}") from error


async def _cancelled(task: asyncio.Task[Any]) -> None:
    """Cancels `task` and waits until it is over; its own failure was seen by whoever awaited it."""
    if not task.done():
        task.cancel()
        await asyncio.wait({task})


def _spread(evaluation: EvaluationResult, built: BuildResult) -> None:
    """The outcome's reward goes to every trace; a reward a trace wins."""
    rewards: list[float | None] = list(evaluation.trace_rewards or [evaluation.outcome_reward] * len(built.traces))
    for trace, reward in zip(built.traces, rewards, strict=True):
        trace.reward = reward


def _check_rewards(result: EvaluationResult, traces: int) -> None:
    rewards = result.trace_rewards if result.trace_rewards is not None else [result.outcome_reward]
    if result.trace_rewards is not None and len(result.trace_rewards) != traces:
        raise EvaluationFault(f"the evaluator gave {len(result.trace_rewards)} trace_rewards for {traces} traces")
    if any(reward is None or not math.isfinite(reward) for reward in rewards):
        raise EvaluationFault(f"the evaluator gave no finite reward: {rewards}")


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
