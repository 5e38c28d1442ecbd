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
    """A session is named after its task, so that one is asked first, and then those that are named alike."""
    own = session.rsplit("-s", 1)[0]
    if (own, session) in _of_task(client, own):
        return own
    tasks = [row.task_id for row in client.tasks(limit=1000).tasks]
    for task in sorted(tasks, key=lambda task: not session.startswith(task)):
        if (task, session) in _of_task(client, task):
            return task
    raise stop(
        f"no task, session or file {session!r} here; `polar status` lists tasks, `polar status TASK` its sessions",
        ExitCode.USAGE,
    )


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
