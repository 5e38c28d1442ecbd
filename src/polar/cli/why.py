"""`polar why`: what of a task was dropped or excluded, and what it waits for."""

from __future__ import annotations

from rich.text import Text

from polar.cli.console import harmless, out, print_json
from polar.cli.options import DEFAULT_SERVER, Json, Server, ServersData
from polar.cli.reasons import Finding, Report, report
from polar.cli.remote import looking, of_task
from polar.cli.tasks import STOPPED, TaskId
from polar.records import TaskState

_SHOWN_SESSIONS = 5


def why(task: TaskId, server: Server = DEFAULT_SERVER, data: ServersData = None, json: Json = False) -> None:
    """Why a task's data is missing: how its sessions ended, which tokens are excluded, what it waits for.

    Every sampled token is trainable, or counted here under a reason; every session that did not simply end is named.

    Example: polar why hello
    """
    with looking(server, data) as (client, stopped), of_task(task):
        said = report(client.task(task))
    if stopped and not TaskState(said.status).terminal:
        said.waiting_for = STOPPED
    if json:
        print_json(said)
        return
    for line in lines(said):
        out().print(Text(harmless(line)))


def lines(said: Report) -> list[str]:
    shown = [f"{said.task_id}: {said.status}, {said.finished} of {said.sessions} sessions are over"]
    shown += [said.error] if said.error else []
    shown += [f"it waits for {said.waiting_for}"] if said.waiting_for else []
    if said.finished:
        shown.append(_ledger(said))
    for finding in said.findings:
        shown += ["", *_finding(finding)]
    if said.finished and not said.findings:
        shown.append("nothing was dropped or excluded")
    return shown


def _ledger(said: Report) -> str:
    excluded = {item.reason: item.tokens for item in said.findings if item.kind == "excluded"}
    parts = "".join(f" + {tokens} {reason}" for reason, tokens in excluded.items())
    others = f"; {said.attempt_discarded} more in attempts that were given up" if said.attempt_discarded else ""
    return f"tokens: {said.sampled} sampled = {said.trainable} trainable{parts}{others}"


def _finding(finding: Finding) -> list[str]:
    count = len(finding.sessions)
    tokens = f", {finding.tokens} tokens" if finding.tokens else ""
    names = ", ".join(finding.sessions[:_SHOWN_SESSIONS]) + (" …" if count > _SHOWN_SESSIONS else "")
    return [
        f"{finding.reason}: {count} session{'s' * (count != 1)}{tokens}: {finding.meaning}",
        f"  {names}",
        *(f"  {error}" for error in finding.errors),
    ]
