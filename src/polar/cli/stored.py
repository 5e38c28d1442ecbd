"""Stored sessions by their names, one at a time: whoever works on a task of any size holds one of its sessions."""

from __future__ import annotations

from collections.abc import Iterable

from polar.cli.console import ExitCode, stop
from polar.client import Client, ClientError
from polar.requests import TaskRequest

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
        raise stop(
            f"no task, session or file {session!r} here; `polar status` lists tasks, `polar status TASK` its sessions",
            ExitCode.USAGE,
        ) from error


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
