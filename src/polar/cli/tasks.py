"""`polar submit`, `status` and `cancel`: hand tasks over, look at them, take them back."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text

from polar.cli.console import ExitCode, grid, harmless, out, print_json, say
from polar.cli.options import DEFAULT_SERVER, Json, Server, ServersData
from polar.cli.remote import connected, looking, of_task
from polar.cli.results import number, seconds
from polar.cli.taskfile import TaskFile, read_tasks
from polar.client import Client, ClientError
from polar.records import GatewayNodeInfo, SessionStatus, SessionSummary, Storage, TaskState, TaskSummary

File = Annotated[Path, typer.Argument(metavar="FILE", help="Tasks: .jsonl (one a line), .yaml or .json.", exists=False)]
TaskId = Annotated[str, typer.Argument(metavar="TASK", help="A task's id.")]
_INTERRUPTED = "interrupted"
STOPPED = "the server: it has stopped, and what was under way goes on when it starts again"


def load(path: Path) -> TaskFile:
    """The file's tasks; its warnings are said."""
    file = read_tasks(path)
    for warning in file.warnings:
        say(f"warning: {warning}", "yellow")
    return file


def submit(file: File, server: Server = DEFAULT_SERVER, data: ServersData = None, json: Json = False) -> None:
    """Hand tasks to the server and return at once. The whole file is checked before anything is sent.

    The same task under the same id is one task, so a submit may be repeated.

    Example: polar submit tasks.jsonl
    """
    tasks = load(file).tasks
    with connected(server, data) as client:
        for task in tasks:
            try:
                accepted = client.submit(task)
            except ClientError as error:
                raise ClientError(f"task {task.task_id}: {error.message}", error.status) from error
            print_json(accepted) if json else out().print(f"{accepted.task_id}  {accepted.status}")


def cancel(task: TaskId, server: Server = DEFAULT_SERVER, data: ServersData = None, json: Json = False) -> None:
    """Stop a task: its sessions end, its sandboxes go, its status becomes cancelled.

    Example: polar cancel hello
    """
    with connected(server, data) as client, of_task(task):
        status = client.cancel(task)
    print_json(status) if json else out().print(f"{status.task_id}  {status.status}")


def status(
    task: Annotated[str | None, typer.Argument(metavar="[TASK]", help="A task's id; all tasks without one.")] = None,
    server: Server = DEFAULT_SERVER,
    data: ServersData = None,
    json: Json = False,
) -> None:
    """What runs: the server's gateways and tasks, or the sessions of one task.

    What was under way when a server stopped is `interrupted` (--data), and goes on when it starts again. Exit code 1:
    the task has failed or was cancelled.

    Examples: polar status, polar status hello
    """
    with looking(server, data) as (client, stopped):
        code = _all(client, stopped, json) if task is None else _one(client, task, stopped, json)
    raise typer.Exit(code)


def _shown(status: SessionStatus | TaskState, stopped: bool) -> str:
    """A stopped server's word for what nobody carries out now would be the last that it had."""
    waits = status in (SessionStatus.REGISTERED, TaskState.CANCELLING)
    return _INTERRUPTED if stopped and not (status.terminal or waits) else status.value


def _one(client: Client, task: str, stopped: bool, json: bool) -> ExitCode:
    with of_task(task):
        known, sessions = client.task(task, results=False), client.sessions(task).sessions
    if json:
        print_json({"task": known, "sessions": sessions, "stopped": stopped})
    else:
        done = f"{known.completed_sessions} of {known.total_sessions} sessions are over"
        out().print(f"{known.task_id}: {_shown(known.status, stopped)}, {done}")
        waits = STOPPED if stopped and not known.status.terminal else known.waiting_for
        for said in (known.error, waits and f"waits for {waits}"):
            if said:
                out().print(said, style="yellow")
        out().print(_sessions(sessions, stopped))
        for error in dict.fromkeys(row.error for row in sessions if row.error):
            out().print(Text(harmless(error), style="red"))
    return ExitCode.FAILED if known.status in (TaskState.FAILED, TaskState.CANCELLED) else ExitCode.OK


def _all(client: Client, stopped: bool, json: bool) -> ExitCode:
    nodes, tasks, storage = client.nodes().nodes, client.tasks().tasks, client.status().storage
    if json:
        print_json({"nodes": nodes, "tasks": tasks, "storage": storage, "stopped": stopped})
    else:
        if stopped:
            out().print("the server of this folder has stopped", style="yellow")
        else:
            out().print(_nodes(nodes) if nodes else "no gateway is connected: tasks wait")
        out().print(_tasks(tasks, stopped) if tasks else "no tasks yet: polar run tasks.jsonl")
        if storage is not None:
            out().print(_kept(storage), style="yellow" if storage.full else None)
    return ExitCode.OK


def _kept(storage: Storage) -> str:
    bound = f" of {storage.limit_bytes / 1e9:.1f}" if storage.limit_bytes is not None else ""
    data = f"data: {storage.used_bytes / 1e9:.1f}{bound} GB used, {storage.free_bytes / 1e9:.1f} GB of the disk free"
    tasks = f"tasks: {storage.tasks} kept, {storage.retired_tasks} retired"
    return f"{data}; {tasks}" + ("; full: new tasks are refused" if storage.full else "")


def _nodes(nodes: list[GatewayNodeInfo]) -> Table:
    table = grid("gateway", "url", "state", ">init", ">ready", ">running", ">after")
    for node in nodes:
        state = "draining" if node.draining else "healthy" if node.healthy else "not healthy"
        now = node.metrics
        counts = (
            now.init_queue_depth + now.init_inflight,
            now.ready_depth,
            now.run_inflight,
            now.postrun_queue_depth + now.postrun_inflight,
        )
        table.add_row(node.node_id, node.gateway_url, state, *map(str, counts))
    return table


def _tasks(tasks: list[TaskSummary], stopped: bool) -> Table:
    table = grid("task", "status", "harness", ">sessions", ">errors", ">mean reward", ">mean traces")
    for task in tasks:
        done = f"{task.completed_sessions}/{task.num_samples}"
        numbers = (done, str(task.errored_sessions), number(task.mean_reward), number(task.mean_traces))
        table.add_row(task.task_id, _shown(task.status, stopped), task.harness, *numbers)
    return table


def _sessions(sessions: list[SessionSummary], stopped: bool) -> Table:
    table = grid("session", "status", "gateway", ">reward", ">time")
    for row in sessions:
        status, time = _shown(row.status, stopped), seconds(row.timing.e2e_ms)
        table.add_row(row.session_id, status, row.node_id or "", number(row.reward), time)
    return table
