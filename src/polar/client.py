"""The rollout server's API for Python programs: `Client`, and `AsyncClient` with the same methods to await.

Each call is written once, as a pure function; both clients send it. Documents travel as msgpack with packed arrays.
A call that fails raises ClientError with the server's own words.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from functools import wraps
from typing import Any, Concatenate, Generic, Literal, ParamSpec, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from polar.codec import from_msgpack
from polar.records import GatewayNodeInfo, SessionResult, SessionSummary, Storage, TaskState, TaskStatus, TaskSummary
from polar.requests import TaskRequest

T = TypeVar("T")
P = ParamSpec("P")
_HEADERS = {"Accept": "application/msgpack", "Content-Type": "application/json"}
_FIRST_LOOK, _LONGEST_LOOK = 0.1, 2.0


class ClientError(Exception):
    """`status` is the HTTP status, None where the server did not answer at all."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class Accepted(msgspec.Struct):
    task_id: str
    status: TaskState
    ignored: str = ""
    """fields of the request that the server does not know"""


class Health(msgspec.Struct):
    status: str
    nodes: int


class Tasks(msgspec.Struct):
    tasks: list[TaskSummary]


class Sessions(msgspec.Struct):
    task_id: str
    sessions: list[SessionSummary]


class Nodes(msgspec.Struct):
    nodes: list[GatewayNodeInfo]


class ServerStatus(msgspec.Struct):
    storage: Storage


class Call(msgspec.Struct, Generic[T]):
    method: str
    path: str
    kind: type[T]
    params: dict[str, str] = {}
    body: bytes | None = None


def health() -> Call[Health]:
    return Call("GET", "/health", Health)


def submit(task: TaskRequest | dict[str, Any]) -> Call[Accepted]:
    """May be repeated: the same task under the same id is one task."""
    document = task.model_dump(mode="json") if isinstance(task, TaskRequest) else task
    return Call("POST", "/rollout/task/submit", Accepted, body=json.dumps(document).encode())


def task(task_id: str, *, results: bool = True) -> Call[TaskStatus]:
    return Call("GET", f"/rollout/task/{_quoted(task_id)}", TaskStatus, _params(results=results))


def cancel(task_id: str, *, register_if_missing: bool = False) -> Call[TaskStatus]:
    params = _params(register_if_missing=register_if_missing)
    return Call("DELETE", f"/rollout/task/{_quoted(task_id)}", TaskStatus, params)


def tasks(
    *, status: str | None = None, harness: str | None = None, since: float | None = None, limit: int | None = None
) -> Call[Tasks]:
    """The newest first; `since` in seconds of the epoch."""
    return Call("GET", "/tasks", Tasks, _params(status=status, harness=harness, since=since, limit=limit))


def sessions(task_id: str) -> Call[Sessions]:
    return Call("GET", f"/tasks/{_quoted(task_id)}/sessions", Sessions)


def session(task_id: str, session_id: str) -> Call[SessionResult]:
    """409 for one that is not over."""
    return Call("GET", f"/tasks/{_quoted(task_id)}/sessions/{_quoted(session_id)}", SessionResult)


def request(task_id: str) -> Call[dict[str, Any]]:
    """The TaskRequest that the task was submitted with."""
    return Call("GET", f"/tasks/{_quoted(task_id)}/request", dict[str, Any])


def log(task_id: str, session_id: str, *, attempt: int | None = None) -> Call[bytes]:
    """The packed session log of the accepted attempt, or of this one."""
    path = f"/tasks/{_quoted(task_id)}/sessions/{_quoted(session_id)}/log"
    return Call("GET", path, bytes, _params(attempt=attempt))


def status() -> Call[ServerStatus]:
    return Call("GET", "/rollout/status", ServerStatus)


def nodes() -> Call[Nodes]:
    return Call("GET", "/nodes", Nodes)


def pause(mode: Literal["drain", "abort"] = "drain", *, timeout_seconds: float = 300.0) -> Call[dict[str, Any]]:
    """Returns once every gateway has paused; ends by itself after `timeout_seconds`."""
    params = _params(mode=mode, timeout_seconds=timeout_seconds)
    return Call("POST", "/rollout/inference/pause", dict[str, Any], params)


def resume() -> Call[dict[str, Any]]:
    return Call("POST", "/rollout/inference/resume", dict[str, Any])


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _params(**values: Any) -> dict[str, str]:
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in values.items()
        if value is not None
    }


def _settings(url: str, token: str | None, timeout: float | None) -> dict[str, Any]:
    token = token or os.environ.get("POLAR_CONTROL_PLANE_TOKEN")
    headers = _HEADERS | ({"X-Polar-Control-Token": token} if token else {})
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _result(call: Call[T], answer: httpx.Response) -> T:
    if answer.status_code >= 400:
        raise ClientError(_detail(answer), answer.status_code)
    if call.kind is bytes:
        return answer.content  # type: ignore[return-value]
    document = from_msgpack(answer.content, call.kind)
    if isinstance(document, Accepted):
        document.ignored = answer.headers.get("X-Polar-Ignored", "")
    return document


def _detail(answer: httpx.Response) -> str:
    try:
        detail = answer.json()["detail"]
    except (ValueError, KeyError, TypeError):
        return f"{answer.status_code}: {answer.text[:300]}"
    if not isinstance(detail, list):
        return str(detail)
    return "; ".join(f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}" for item in detail)


def _unreachable(url: httpx.URL, error: httpx.HTTPError) -> ClientError:
    return ClientError(f"the rollout server {url} does not answer: {error or type(error).__name__}")


def _looks(task_id: str, timeout: float | None) -> Iterator[float]:
    """How long to wait before each next look. Raises TimeoutError after `timeout` seconds."""
    deadline = float("inf") if timeout is None else time.monotonic() + timeout
    pause = _FIRST_LOOK
    while time.monotonic() <= deadline:
        yield pause
        pause = min(2 * pause, _LONGEST_LOOK)
    raise TimeoutError(f"the task {task_id} is not over after {timeout} s")


def _now(build: Callable[P, Call[T]]) -> Callable[Concatenate[Client, P], T]:
    @wraps(build)
    def method(self: Client, *arguments: P.args, **options: P.kwargs) -> T:
        return self.send(build(*arguments, **options))

    return method


def _soon(build: Callable[P, Call[T]]) -> Callable[Concatenate[AsyncClient, P], Awaitable[T]]:
    @wraps(build)
    async def method(self: AsyncClient, *arguments: P.args, **options: P.kwargs) -> T:
        return await self.send(build(*arguments, **options))

    return method


class Client:
    """`token` None: POLAR_CONTROL_PLANE_TOKEN, where it is set. A context manager."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float | None = 60.0) -> None:
        self._http = httpx.Client(**_settings(url, token, timeout))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, call: Call[T]) -> T:
        try:
            answer = self._http.request(call.method, call.path, params=call.params, content=call.body)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _result(call, answer)

    health, submit, task, cancel = _now(health), _now(submit), _now(task), _now(cancel)
    tasks, sessions, log, nodes = _now(tasks), _now(sessions), _now(log), _now(nodes)
    session, request = _now(session), _now(request)
    status, pause, resume = _now(status), _now(pause), _now(resume)

    def wait(self, task_id: str, *, timeout: float | None = None) -> TaskStatus:
        """The task with its results once it is terminal. Raises TimeoutError after `timeout` seconds."""
        looks = _looks(task_id, timeout)
        while not self.task(task_id, results=False).status.terminal:
            time.sleep(next(looks))
        return self.task(task_id)


class AsyncClient:
    """As Client."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float | None = 60.0) -> None:
        self._http = httpx.AsyncClient(**_settings(url, token, timeout))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        try:
            answer = await self._http.request(call.method, call.path, params=call.params, content=call.body)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _result(call, answer)

    health, submit, task, cancel = _soon(health), _soon(submit), _soon(task), _soon(cancel)
    tasks, sessions, log, nodes = _soon(tasks), _soon(sessions), _soon(log), _soon(nodes)
    session, request = _soon(session), _soon(request)
    status, pause, resume = _soon(status), _soon(pause), _soon(resume)

    async def wait(self, task_id: str, *, timeout: float | None = None) -> TaskStatus:
        looks = _looks(task_id, timeout)
        while not (await self.task(task_id, results=False)).status.terminal:
            await asyncio.sleep(next(looks))
        return await self.task(task_id)
