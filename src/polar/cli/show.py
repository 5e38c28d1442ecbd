"""`polar show`: one session, turn by turn, from the server or from a session log on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from zstandard import ZstdError

from polar.cli import turns as story
from polar.cli.console import ExitCode, out, print_json, say, stop
from polar.cli.options import DEFAULT_SERVER, Json, Server, ServersData
from polar.cli.remote import reading
from polar.cli.stored import task_of
from polar.cli.tokens import Decoder, decoder, legend
from polar.client import Client, ClientError
from polar.errors import ConfigError
from polar.records import BuildResult, CallCounts, SessionResult, TokenLedger
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog, parse, read, unpack
from polar.trajectory import load_builder
from polar.trajectory.view import turns

_LOG_LINES = 10
Found = tuple[SessionLog | None, SessionResult | None]


def show(
    session: Annotated[str, typer.Argument(metavar="SESSION", help="A session's id, or a session log's path.")],
    tokens: Annotated[bool, typer.Option("--tokens", "-t", help="Spell out every token.")] = False,
    tokenizer: Annotated[
        Path | None, typer.Option("--tokenizer", metavar="DIR", help="Folder with tokenizer.json. [the log's own]")
    ] = None,
    builder: Annotated[
        str, typer.Option("--builder", help="Which builder makes traces of a log without a result.")
    ] = "prefix_merging",
    server: Server = DEFAULT_SERVER,
    data: ServersData = None,
    json: Json = False,
) -> None:
    """What the policy saw and said in one session, turn by turn.

    Each turn: where its context came from, how many prompt ids it kept from the turn it continues, what it sampled,
    and the trace that trains it or why none does. With --tokens every token, coloured by its logprob; struck out where
    it is not trained.

    Examples:

        polar show hello-s0-1a2b3c4d --tokens

        polar show polar-data/logs/hello-s0-1a2b3c4d.1.zst
    """
    path = Path(session)
    log, result = (_from_file(path), None) if path.is_file() else _from_server(session, server, data)
    if log is None:
        assert result is not None
        _show_result(result, json)
        return
    known = turns(log, _built(log, result, builder))
    decode = decoder(_tokenizer_folder(log, tokenizer))
    if json:
        print_json(story.document(log, result, known, decode))
    else:
        _print(log, result, known, decode, tokens)


def _from_file(path: Path) -> SessionLog:
    try:
        return read(path)
    except (OSError, ZstdError) as error:
        raise ConfigError(f"{path} is no session log: {error}") from error


def _from_server(session: str, server: str, data: Path | None) -> Found:
    with reading(server, data) as client:
        task = task_of(client, session)
        result = _result(client, task, session)
        try:
            return parse(unpack(client.log(task, session))), result
        except ClientError as error:
            if error.status != 404:
                raise
            if result is None:
                raise stop(f"{session} is not over; see polar status {task}", ExitCode.USAGE) from error
            return None, result


def _result(client: Client, task: str, session: str) -> SessionResult | None:
    """None while it is not over."""
    try:
        return client.session(task, session)
    except ClientError as error:
        if error.status != 409:
            raise
        return None


def _built(log: SessionLog, result: SessionResult | None, builder: str) -> BuildResult:
    """The traces that were handed out; made anew where there are none."""
    if result is not None and result.trajectory is not None:
        return BuildResult(traces=result.trajectory.traces, tokens=TokenLedger(), calls=CallCounts())
    return load_builder(StrategySpec(strategy=builder)).build(log)


def _tokenizer_folder(log: SessionLog, given: Path | None) -> Path | None:
    if given is not None:
        return given
    own = Path(log.header.tokenizer) if log.header.tokenizer else None
    return own if own is not None and (own / "tokenizer.json").is_file() else None


def _print(
    log: SessionLog, result: SessionResult | None, known: list[story.Turn], decode: Decoder, tokens: bool
) -> None:
    console = out()
    for line in story.heading(log, result):
        console.print(line)
    console.print(story.table(known) if known else "no model call was made")
    for line in (*story.forks(known, decode), *story.refusals(log)):
        console.print(line)
    if tokens:
        console.print(legend())
        for line in story.spelled(known, decode):
            console.print(line)
    for line in story.harness_log(result, _LOG_LINES) if result else ():
        console.print(line)


def _show_result(result: SessionResult, json: bool) -> None:
    say("there is no session log: the session ended before it made one", "yellow")
    if json:
        print_json(result)
        return
    for line in (*story.ending(result), *story.harness_log(result, _LOG_LINES)):
        out().print(line)
