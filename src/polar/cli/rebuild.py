"""`polar rebuild`: trajectories built anew from stored session logs, without a model call."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer
from zstandard import ZstdError

from polar.cli.changes import Change, figures, in_progress, report
from polar.cli.options import DEFAULT_SERVER, Config, Json, Out, Server, ServersData, settings
from polar.cli.remote import reading
from polar.cli.resultfile import writing
from polar.cli.results import termination
from polar.cli.stored import Place, Requests, places
from polar.client import Client, ClientError
from polar.codec import to_msgpack
from polar.endings import TABLE, Ending
from polar.errors import BuildFault, PolarError
from polar.records import BuildResult, SessionResult, Termination
from polar.replay import discarded, rebuilt, run_termination
from polar.requests import StrategySpec, TaskRequest
from polar.sessionlog import SessionLog, parse, unpack
from polar.trajectory import BUILDERS, build, load_builder

Names = Annotated[list[str], typer.Argument(metavar="TASK|SESSION", help="Tasks (all their sessions) or sessions.")]
BuilderName = Annotated[
    str | None, typer.Option("--builder", help=f"{', '.join(BUILDERS)}, or module:Class. [the task's own]")
]
Attempt = Annotated[int | None, typer.Option("--attempt", min=1, help="Of which attempt. [the accepted one]")]
Auxiliary = Annotated[
    bool | None,
    typer.Option("--include-auxiliary/--no-include-auxiliary", help="Train the helper model's calls. [as the task]"),
]


def rebuild(
    names: Names,
    builder: BuilderName = None,
    config: Config = None,
    include_auxiliary: Auxiliary = None,
    attempt: Attempt = None,
    out: Out = None,
    server: Server = DEFAULT_SERVER,
    data: ServersData = None,
    json: Json = False,
) -> None:
    """Build trajectories anew from the stored session logs: by another builder, or one that has been mended.

    Nothing on the server changes: a session has one result. What is built is compared with it, and written to --out.
    The same builder with the same settings gives the same bytes. A session that ended as `build` gets its trajectory,
    and can then be scored (`polar rescore --in`); one whose ending has no trajectory (`cancelled`, say) is kept as it
    is. Exit code 1: a session could not be built; it is named, and not in the file.

    Examples:

        polar rebuild hello --builder per_request

        polar rebuild hello --builder my_package:MyBuilder --config depth=3 --out hello.msgpack --data polar-data
    """
    choice = _Choice(builder=builder, config=settings(config), include_auxiliary=include_auxiliary, attempt=attempt)
    if builder is not None:
        load_builder(choice.spec(StrategySpec()))
    with reading(server, data) as client, writing(out) as write:
        requests, wanted = Requests(client), places(client, names)

        def one(place: Place) -> Change:
            change, result = _one(client, place, requests, choice)
            if result is not None:
                write(result)
            return change

        changes = in_progress(map(one, wanted), len(wanted), "building")
    raise typer.Exit(report(changes, tokens=True, saved=out, json=json))


class _Choice(msgspec.Struct, kw_only=True, frozen=True):
    """What is to be other than the task had it."""

    builder: str | None
    config: dict[str, object]
    include_auxiliary: bool | None
    attempt: int | None

    def spec(self, own: StrategySpec) -> StrategySpec:
        if self.builder is not None:
            return StrategySpec(strategy=self.builder, config=self.config)
        return StrategySpec(strategy=own.strategy, config=own.config | self.config)

    def build(self, log: SessionLog, task: TaskRequest, ending: Ending) -> BuildResult:
        auxiliary = task.include_auxiliary if self.include_auxiliary is None else self.include_auxiliary
        return build(load_builder(self.spec(task.builder)), log, ending, include_auxiliary=auxiliary)


def _one(client: Client, place: Place, requests: Requests, choice: _Choice) -> tuple[Change, SessionResult | None]:
    task, session = place
    try:
        stored = client.session(task, session)
        fresh = _fresh(client, stored, requests.of(task), choice)
    except ClientError as error:
        if error.status is None:
            raise
        return Change(session_id=session, task_id=task, what="failed", why=error.message), None
    except (PolarError, OSError, msgspec.MsgspecError) as error:
        return Change(session_id=session, task_id=task, what="failed", why=str(error)), None
    change = Change(session_id=session, task_id=task, what="changed", before=figures(stored), after=figures(fresh))
    if fresh is stored:
        change.what, change.why = "kept", termination(stored)
    elif to_msgpack(fresh.trajectory) == to_msgpack(stored.trajectory):
        change.what = "same"
    return change, fresh


def _fresh(client: Client, stored: SessionResult, task: TaskRequest, choice: _Choice) -> SessionResult:
    """`stored` itself where its ending has no trajectory. Raises what goes wrong with this one session."""
    accepted = stored.metadata.get("attempt")
    if choice.attempt not in (None, accepted):
        log = _log(client, stored, choice.attempt)
        return discarded(stored, choice.build(log, task, TABLE[Termination.INFRASTRUCTURE]), log.header.attempt)
    ended = run_termination(stored)
    if ended is None:
        return stored
    log = _log(client, stored, accepted)
    if log.torn:
        raise BuildFault("its log is damaged; `polar show` tells how far it can be read")
    return rebuilt(stored, choice.build(log, task, TABLE[ended]), log.header.attempt)


def _log(client: Client, stored: SessionResult, attempt: int | None) -> SessionLog:
    packed = client.log(stored.task_id, stored.session_id, attempt=attempt)
    try:
        return parse(unpack(packed), "its log")
    except ZstdError as error:
        raise BuildFault(f"its log is damaged: {error}") from error
