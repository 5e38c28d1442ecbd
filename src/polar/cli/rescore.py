"""`polar rescore`: stored trajectories scored anew, by an evaluator that needs no sandbox."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from polar.cli import logs
from polar.cli.changes import Change, figures, in_progress, report
from polar.cli.options import DEFAULT_SERVER, Config, Json, Out, Server, ServersData, settings
from polar.cli.remote import reading
from polar.cli.resultfile import reading as reading_file
from polar.cli.resultfile import writing
from polar.cli.results import termination
from polar.cli.stored import Place, Requests, places
from polar.client import Client, ClientError
from polar.endings import TABLE
from polar.errors import ConfigError, EvaluationFault, TaskFault
from polar.evaluators import EVALUATORS, evaluator_class, load_evaluator
from polar.plugins import blamed_on
from polar.protocols import EvaluationContext
from polar.records import EvaluationResult, SessionResult, Termination, Trajectory
from polar.replay import rescored, run_termination
from polar.requests import EvaluatorSpec, TaskRequest, budgets_of

Names = Annotated[
    list[str] | None, typer.Argument(metavar="[TASK|SESSION]", help="Tasks (all their sessions) or sessions.")
]
In = Annotated[
    Path | None,
    typer.Option("--in", metavar="FILE", help="Results from a file instead: `polar rebuild --out`, `run --save`."),
]
EvaluatorName = Annotated[str, typer.Option("--evaluator", help="session_completed, or module:Class.")]


def rescore(
    evaluator: EvaluatorName,
    names: Names = None,
    results: In = None,
    config: Config = None,
    out: Out = None,
    server: Server = DEFAULT_SERVER,
    data: ServersData = None,
    json: Json = False,
) -> None:
    """Score stored trajectories anew, by another evaluator: one that looks at the trajectory alone.

    An evaluator that looks into the sandbox cannot be used: the sandbox is gone. Nothing on the server changes: a
    session has one result. What is scored is compared with it, and written to --out. What a task asked for is read from
    the server (or --data) also with --in. A session without a trajectory is kept as it is. Exit code 1: the evaluator
    failed on a session, which then has no reward; the others go on.

    Examples:

        polar rescore hello --evaluator my_package:MyEvaluator --config strict=true

        polar rescore --in hello.msgpack --evaluator session_completed --out scored.msgpack --data polar-data
    """
    logs.configure(verbose=False)
    spec = EvaluatorSpec(strategy=evaluator, config=settings(config))
    _check(spec)
    if bool(names) == bool(results):
        raise ConfigError("which sessions? Give tasks or sessions, or --in FILE, one of them")
    with reading(server, data) as client, writing(out) as write, asyncio.Runner() as runner:
        total, sessions = reading_file(results) if results else _stored(client, places(client, names or []))
        requests = Requests(client)

        def one(stored: SessionResult | Change) -> Change:
            if isinstance(stored, Change):
                return stored
            change, fresh = _one(runner, stored, requests, spec)
            if fresh is not None:
                write(fresh)
            return change

        changes = in_progress(map(one, sessions), total, "scoring")
    raise typer.Exit(report(changes, tokens=False, saved=out, json=json))


def _check(spec: EvaluatorSpec) -> None:
    """Raises what is wrong with the evaluator before anything is read."""
    if getattr(evaluator_class(spec.strategy), "needs_runtime", True):
        able = [name for name in EVALUATORS if not evaluator_class(name).needs_runtime]
        raise ConfigError(
            f"the evaluator {spec.strategy} looks into the sandbox, and that of a stored session is gone: run the task "
            f"again, or use {', '.join(able)}, or a module:Class that has needs_runtime = False"
        )
    with blamed_on(TaskFault, f"the evaluator {spec.strategy}"):
        load_evaluator(spec)


def _stored(client: Client, wanted: list[Place]) -> tuple[int, Iterator[SessionResult | Change]]:
    return len(wanted), (_result(client, place) for place in wanted)


def _result(client: Client, place: Place) -> SessionResult | Change:
    try:
        return client.session(*place)
    except ClientError as error:
        if error.status is None:
            raise
        return Change(session_id=place[1], task_id=place[0], what="failed", why=error.message)


def _one(
    runner: asyncio.Runner, stored: SessionResult, requests: Requests, spec: EvaluatorSpec
) -> tuple[Change, SessionResult | None]:
    change = Change(session_id=stored.session_id, task_id=stored.task_id, what="scored", before=figures(stored))
    try:
        ended = run_termination(stored)
        if ended is None or stored.trajectory is None:
            change.what, change.why, change.after = "kept", termination(stored), change.before
            return change, stored
        outcome = _outcome(runner, stored, requests.of(stored.task_id), ended, spec)
    except (ClientError, msgspec.MsgspecError) as error:
        if isinstance(error, ClientError) and error.status is None:
            raise
        change.what, change.why = "failed", f"its task {stored.task_id}: {error}"
        return change, None
    fresh = rescored(stored, spec.strategy, outcome)
    change.after = figures(fresh)
    if isinstance(outcome, EvaluationFault):
        change.what, change.why = "failed", outcome.message
    return change, fresh


def _outcome(
    runner: asyncio.Runner, stored: SessionResult, task: TaskRequest, ended: Termination, spec: EvaluatorSpec
) -> EvaluationResult | EvaluationFault:
    from polar.gateway.grading import grade

    assert stored.trajectory is not None, "it is scored"
    status, seconds = TABLE[ended].status, budgets_of(task).evaluate
    traces = [msgspec.structs.replace(trace, reward=None) for trace in stored.trajectory.traces]

    async def context() -> EvaluationContext:
        return EvaluationContext(
            task=task,
            session_id=stored.session_id,
            status=status,
            termination=ended,
            trajectory=Trajectory(status=status, traces=traces),
            runtime=None,
            timeout=seconds,
        )

    try:
        return runner.run(grade(load_evaluator(spec), seconds, context))
    except EvaluationFault as fault:
        return fault
    except OSError as error:
        return EvaluationFault(f"the evaluator met {type(error).__name__}: {error}")
