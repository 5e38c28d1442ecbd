"""Stored sessions by their names, one at a time: whoever works on a task of any size holds one of its sessions."""

from __future__ import annotations

from collections.abc import Iterable

from polar.cli.console import ExitCode, stop
from polar.client import Client, ClientError
from polar.requests import TaskRequest

_NAMED = 8
Place = tuple[str, str]
"""(task_id, session_id)"""


def places(client: Client, names: Iterable[str]) -> list[Place]:
    """The sessions that are named, and all of each task that is; a name that is neither ends the command."""
    found = [place for name in names for place in _of_task(client, name) or [(task_of(client, name), name)]]
    return list(dict.fromkeys(found))


def task_of(client: Client, session: str) -> str:
    try:
        return client.find_session(session).task_id
    except ClientError as error:
        if error.status != 404:
            raise
        raise stop(_nothing_of(client, session), ExitCode.USAGE) from error


def _nothing_of(client: Client, name: str) -> str:
    sessions = [session for _, session in _of_task(client, name)]
    if sessions:
        more = f" and {len(sessions) - _NAMED} more (`polar status {name}`)" if len(sessions) > _NAMED else ""
        return f"{name!r} is a task: name one of its sessions, {', '.join(sessions[:_NAMED])}{more}"
    return f"no task, session or file {name!r} here; `polar status` lists tasks, `polar status TASK` its sessions"


def _of_task(client: Client, task: str) -> list[Place]:
    try:
        return [(task, row.session_id) for row in client.sessions(task).sessions]
    except ClientError as error:
        if error.status != 404:
            raise
        return []


class Requests:
    """What tasks asked for; each is fetched once."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._known: dict[str, TaskRequest] = {}

    def of(self, task: str) -> TaskRequest:
        """Raises ClientError 404 for a task that the server does not have."""
        if task not in self._known:
            self._known[task] = TaskRequest.model_validate(self._client.request(task))
        return self._known[task]
