"""A rollout server as the commands see it: what goes wrong becomes an exit code and a sentence that says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from urllib.parse import urlsplit

from polar.cli.console import ExitCode, stop
from polar.cli.offline import served
from polar.cli.options import DEFAULT_DATA
from polar.client import Client, ClientError
from polar.config import TOKEN_VARIABLE

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@contextmanager
def reading(url: str, data: Path | None) -> Iterator[Client]:
    """As `connected`, for commands that only look: a given data folder that no server has is read by itself."""
    with looking(url, data) as (client, _):
        yield client


@contextmanager
def looking(url: str, data: Path | None) -> Iterator[tuple[Client, bool]]:
    """As `reading`, with whether the folder's server has stopped."""
    if data is not None and not (data / "polar.db").is_file():
        raise stop(f"--data {data} is no data folder of a Polar server: it has no polar.db", ExitCode.USAGE)
    with served(data) if data else nullcontext() as own, connected(own or url, data) as client:
        yield client, own is not None


@contextmanager
def connected(url: str, data: Path | None) -> Iterator[Client]:
    """A client; inside the block a ClientError ends the command. The control token is looked for in `data`."""
    address = urlsplit(url)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise stop(f"--server {url!r} is no URL: write it like http://127.0.0.1:8080", ExitCode.USAGE)
    try:
        with Client(url, _token(address.hostname, data)) as client:
            yield client
    except ClientError as error:
        raise stop(_advice(error), code_of(error)) from error


def _token(host: str, data: Path | None) -> str | None:
    """POLAR_CONTROL_PLANE_TOKEN; else, for a server of this machine alone, the one in the data folder."""
    file = (data or DEFAULT_DATA) / "control_token"
    if os.environ.get(TOKEN_VARIABLE) or host not in _LOOPBACK or not file.is_file():
        return None
    return file.read_text().strip()


_START = (
    "Start it with `polar serve`, or name another with --server; "
    "what only looks (status, show, why, rebuild, rescore) reads the folder of a server that has stopped with --data"
)


_UNKNOWN = "Task not found"
"""a rollout server's word; what is none answers 404 in other words"""


@contextmanager
def of_task(task: str) -> Iterator[None]:
    """A task that the server does not know is named."""
    try:
        yield
    except ClientError as error:
        if error.message != _UNKNOWN:
            raise
        known = "`polar status` lists those it has, `polar show` takes a session"
        raise ClientError(f"the rollout server has no task {task!r}: {known}", error.status) from error


def code_of(error: ClientError) -> ExitCode:
    if error.status is None:
        return ExitCode.UNREACHABLE
    return ExitCode.USAGE if error.status < 500 else ExitCode.FAILED


def _advice(error: ClientError) -> str:
    if error.status is None:
        return f"{error.message}. {_START}"
    if error.status == 401:
        data = "give --data with the server's data folder; a gateway's address will not do"
        return f"{error.message}. Set {TOKEN_VARIABLE}, or {data}"
    return error.message
