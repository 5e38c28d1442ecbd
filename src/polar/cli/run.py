"""`polar run`: hand tasks over, watch them, see the rewards. Ctrl-C takes back what it handed over."""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO, Annotated

import typer
from rich.console import Group
from rich.live import Live
from rich.text import Text

from polar.cli.console import ExitCode, err, grid, out, print_json, say
from polar.cli.options import DEFAULT_SERVER, Json, Server, ServersData
from polar.cli.progress import AWAY_SECONDS, LOOK_SECONDS, Row, Run
from polar.cli.remote import connected
from polar.cli.results import mean, number
from polar.cli.tasks import File, load
from polar.client import ClientError
from polar.codec import to_json
from polar.errors import ConfigError
from polar.records import SessionStatus, TaskResult
from polar.requests import TaskRequest

_SHOWN = 30
"""rows of the live table; the totals stand below"""
_CANCEL_SECONDS = 15.0
_GONE = f"the rollout server does not answer; it is asked again for {AWAY_SECONDS:.0f} s"
_BACK = "the rollout server is back"

Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="Write the results there, one task a line (JSONL).")
]
Fresh = Annotated[bool, typer.Option("--fresh", help="Under new ids: run also what the server knows already.")]


def run(
    file: File,
    server: Server = DEFAULT_SERVER,
    data: ServersData = None,
    save: Save = None,
    fresh: Fresh = False,
    json: Json = False,
) -> None:
    """Run a file of tasks, watch them, and see their rewards.

    The whole file is checked before anything is sent. A task that the server knows already is not run again. Ctrl-C
    cancels what is not over. Exit code 1: a task has failed.

    Examples:

        polar run tasks.jsonl

        polar run tasks.yaml --save results.jsonl --fresh
    """
    tasks = _renamed(load(file).tasks) if fresh else load(file).tasks
    with connected(server, data) as client, _saving(save) as saving:
        following = Run(client, ((task.task_id, task.num_samples) for task in tasks))
        with _cancelling(following):
            if over := following.submit(tasks):
                say(f"{over} of {len(tasks)} tasks were over before; --fresh runs them again under new ids", "yellow")
            _watch(following, saving, live=not json and err().is_terminal)
    _report(following, save, json)
    raise typer.Exit(ExitCode.FAILED if following.failed else ExitCode.OK)


def _renamed(tasks: list[TaskRequest]) -> list[TaskRequest]:
    stamp = f"{time.time_ns() // 1_000_000:x}"
    return [task.model_copy(update={"task_id": f"{task.task_id}-{stamp}"}) for task in tasks]


@contextmanager
def _saving(path: Path | None) -> Iterator[IO[bytes] | None]:
    """Opened before anything is sent: results that cannot be saved are not worth waiting for."""
    try:
        file = path.open("wb") if path else nullcontext()
    except OSError as error:
        raise ConfigError(f"--save {path} cannot be written: {error.strerror}") from error
    with file as open_file:
        yield open_file


@contextmanager
def _cancelling(following: Run) -> Iterator[None]:
    """Takes back what was submitted when the run ends early: by Ctrl-C (SIGTERM is the same), or because the server
    refuses one of its tasks. A second Ctrl-C ends at once; the server goes on cancelling what it was told to."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    except (KeyboardInterrupt, ClientError) as why:
        if isinstance(why, KeyboardInterrupt) or why.status is not None:
            _take_back(following)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _take_back(following: Run) -> None:
    if count := following.cancel():
        say(f"cancelling {count} task{'s' * (count != 1)}", "yellow")
        _await_cancelled(following)


def _await_cancelled(following: Run) -> None:
    deadline = time.monotonic() + _CANCEL_SECONDS
    while following.unfinished and time.monotonic() < deadline:
        following.look()
        time.sleep(LOOK_SECONDS / 2)
    if following.unfinished:
        say(f"still being cancelled: {', '.join(following.unfinished)}", "yellow")


def _watch(following: Run, saving: IO[bytes] | None, live: bool) -> None:
    screen = Live(console=err(), auto_refresh=False, transient=True) if live else nullcontext()
    said: set[str] = set()
    away = False
    with screen as shown:

        def seen(over: list[Row]) -> None:
            nonlocal away
            for row in over:
                _save(following, row, saving)
            if following.away is not away:
                away = following.away
                line = Text(_GONE if away else _BACK, style="yellow")
                (shown.console if shown is not None else err()).print(line)
            if shown is not None:
                shown.update(_table(following, _SHOWN), refresh=True)
            else:
                _say_lines(following, over, said)

        following.follow(seen)


def _save(following: Run, row: Row, saving: IO[bytes] | None) -> None:
    if saving is None:
        return
    known = following.results[row.task_id]
    result = TaskResult(
        task_id=known.task_id, status=known.status, results=known.results, result_paths=known.result_paths
    )
    saving.write(to_json(result) + b"\n")
    saving.flush()


def _say_lines(following: Run, over: list[Row], said: set[str]) -> None:
    """For where there is no screen: a line for each task that is over, and for each new thing that is waited for."""
    for row in following.rows.values():
        if row.waiting_for and row.waiting_for not in said:
            said.add(row.waiting_for)
            say(f"{row.task_id} waits for {row.waiting_for}", "yellow")
    counted = f"{len(following.results)} of {len(following.rows)} tasks are over"
    for row in over:
        say(f"{row.task_id}: {row.status}, mean reward {number(row.mean_reward)} ({counted})")


def _table(following: Run, most: int | None = None) -> Group:
    """Unfinished tasks first where not all can be shown; what is to be said about some of them stands below."""
    table = grid("task", "status", ">sessions", ">mean reward", ">traces", ">sampled", ">trainable", "not trained")
    rows = list(following.rows.values())
    shown = sorted(rows, key=lambda row: row.task_id in following.results)[:most] if most else rows
    for row in shown:
        table.add_row(*_cells(row))
    if len(rows) > 1:
        table.add_row(*_cells(_total(following)), style="bold")
    return Group(table, *(Text(note, style="yellow") for row in shown for note in _notes(row)))


def _notes(row: Row) -> list[str]:
    waits = [f"{row.task_id} waits for {row.waiting_for}"] if row.waiting_for else []
    return waits + ([f"{row.task_id}: {row.error}"] if row.error else [])


def _cells(row: Row) -> tuple[str, ...]:
    tokens = ("" if value is None else str(value) for value in (row.sampled, row.trainable))
    ended = ", ".join(f"{count} {name}" for name, count in row.untrained.items())
    done = f"{row.done}/{row.sessions}"
    return (row.task_id, row.status, done, number(row.mean_reward), number(row.traces), *tokens, ended)


def _total(following: Run) -> Row:
    rows = following.rows.values()
    return Row(
        task_id="all",
        status=f"{len(following.results)}/{len(rows)} over",
        sessions=sum(row.sessions for row in rows),
        done=sum(row.done for row in rows),
        mean_reward=mean(row.mean_reward for row in rows),
        traces=mean(row.traces for row in rows),
        sampled=sum(row.sampled or 0 for row in rows),
        trainable=sum(row.trainable or 0 for row in rows),
        untrained=dict(sum((Counter(row.untrained) for row in rows), Counter())),
    )


def _report(following: Run, save: Path | None, json: bool) -> None:
    paths = [path for known in following.results.values() for path in known.result_paths]
    if json:
        print_json({"tasks": list(following.rows.values()), "result_paths": paths, "saved": save and str(save)})
        return
    out().print(_table(following))
    if paths:
        out().print(f"results: {os.path.commonpath([Path(path).parent for path in paths])}")
    if save:
        out().print(f"saved: {save}")
    for line in _closer(following):
        out().print(line)


def _closer(following: Run) -> list[str]:
    """What to type next: a session to look at, and a task that has something to explain."""
    over = following.results.values()
    sessions = [result for known in over for result in known.results]
    bad = [result for result in sessions if result.status is not SessionStatus.COMPLETED]
    look = [f"look closer: polar show {sessions[0].session_id}"] if sessions else []
    return look + ([f"what went wrong: polar why {bad[0].task_id}"] if bad else [])
