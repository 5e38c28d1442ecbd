"""The rollout server's API for Python programs: `Client`, and `AsyncClient` with the same methods to await.

Documents travel as msgpack with packed arrays. A call that fails raises ClientError with the server's own words.
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Iterator
from types import TracebackType
from typing import Any, Generic, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from polar.codec import from_json, from_msgpack
from polar.records import Event, GatewayNodeInfo, SessionSummary, TaskState, TaskStatus, TaskSummary
from polar.requests import TaskRequest

T = TypeVar("T")
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


class _Tasks(msgspec.Struct):
    tasks: list[TaskSummary]


class _Sessions(msgspec.Struct):
    sessions: list[SessionSummary]


class _Nodes(msgspec.Struct):
    nodes: list[GatewayNodeInfo]


class _Call(msgspec.Struct, Generic[T]):
    method: str
    path: str
    kind: type[T]
    params: dict[str, str] = {}
    body: bytes | None = None


def _task_path(task_id: str) -> str:
    return f"/rollout/task/{quote(task_id, safe='')}"


def _params(**values: Any) -> dict[str, str]:
    return {key: str(value) for key, value in values.items() if value is not None}


def _submit(task: TaskRequest | dict[str, Any]) -> _Call[Accepted]:
    document = task.model_dump(mode="json") if isinstance(task, TaskRequest) else task
    return _Call("POST", "/rollout/task/submit", Accepted, body=json.dumps(document).encode())


def _task(task_id: str, results: bool) -> _Call[TaskStatus]:
    return _Call("GET", _task_path(task_id), TaskStatus, _params(results=str(results).lower()))


def _cancel(task_id: str, register_if_missing: bool) -> _Call[TaskStatus]:
    params = _params(register_if_missing=str(register_if_missing).lower())
    return _Call("DELETE", _task_path(task_id), TaskStatus, params)


def _sessions(task_id: str) -> _Call[_Sessions]:
    return _Call("GET", f"/tasks/{quote(task_id, safe='')}/sessions", _Sessions)


def _log(task_id: str, session_id: str, attempt: int | None) -> _Call[bytes]:
    path = f"/tasks/{quote(task_id, safe='')}/sessions/{quote(session_id, safe='')}/log"
    return _Call("GET", path, bytes, _params(attempt=attempt))


def _pause(mode: str, timeout_seconds: float) -> _Call[dict[str, Any]]:
    params = _params(mode=mode, timeout_seconds=timeout_seconds)
    return _Call("POST", "/rollout/inference/pause", dict[str, Any], params)


_HEALTH = _Call("GET", "/health", Health)
_NODES = _Call("GET", "/nodes", _Nodes)
_RESUME = _Call("POST", "/rollout/inference/resume", dict[str, Any])


def _settings(url: str, token: str | None, timeout: float | None) -> dict[str, Any]:
    token = token or os.environ.get("POLAR_CONTROL_PLANE_TOKEN")
    headers = _HEADERS | ({"X-Polar-Control-Token": token} if token else {})
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _result(call: _Call[T], answer: httpx.Response) -> T:
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


def _event(line: str) -> Event | None:
    return from_json(line[5:], Event) if line.startswith("data:") else None


class Client:
    """`token` None: POLAR_CONTROL_PLANE_TOKEN, where it is set."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float | None = 60.0) -> None:
        self._http = httpx.Client(**_settings(url, token, timeout))

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._http.close()

    def _send(self, call: _Call[T]) -> T:
        try:
            answer = self._http.request(call.method, call.path, params=call.params, content=call.body)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _result(call, answer)

    def health(self) -> Health:
        return self._send(_HEALTH)

    def submit(self, task: TaskRequest | dict[str, Any]) -> Accepted:
        """May be repeated: the same task under the same id is one task."""
        return self._send(_submit(task))

    def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        return self._send(_task(task_id, results))

    def cancel(self, task_id: str, *, register_if_missing: bool = False) -> TaskStatus:
        return self._send(_cancel(task_id, register_if_missing))

    def tasks(self, **filters: Any) -> list[TaskSummary]:
        """Filters: status, harness, since (seconds of the epoch), limit. The newest first."""
        return self._send(_Call("GET", "/tasks", _Tasks, _params(**filters))).tasks

    def sessions(self, task_id: str) -> list[SessionSummary]:
        return self._send(_sessions(task_id)).sessions

    def log(self, task_id: str, session_id: str, attempt: int | None = None) -> bytes:
        """The packed session log of the accepted attempt, or of this one."""
        return self._send(_log(task_id, session_id, attempt))

    def nodes(self) -> list[GatewayNodeInfo]:
        return self._send(_NODES).nodes

    def pause(self, mode: str = "drain", timeout_seconds: float = 300.0) -> dict[str, Any]:
        return self._send(_pause(mode, timeout_seconds))

    def resume(self) -> dict[str, Any]:
        return self._send(_RESUME)

    def wait(self, task_id: str, *, timeout: float | None = None) -> TaskStatus:
        """The task with its results once it is terminal. Raises TimeoutError after `timeout` seconds."""
        deadline = None if timeout is None else time.monotonic() + timeout
        pause = _FIRST_LOOK
        while not self.task(task_id, results=False).status.terminal:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"the task {task_id} is not over after {timeout} s")
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_LOOK)
        return self.task(task_id)

    def events(self) -> Iterator[Event]:
        """What happens from now on, until the server stops."""
        with self._http.stream("GET", "/events", timeout=None) as answer:
            yield from (event for line in answer.iter_lines() if (event := _event(line)) is not None)


class AsyncClient:
    """As Client."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float | None = 60.0) -> None:
        self._http = httpx.AsyncClient(**_settings(url, token, timeout))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        await self._http.aclose()

    async def _send(self, call: _Call[T]) -> T:
        try:
            answer = await self._http.request(call.method, call.path, params=call.params, content=call.body)
        except httpx.HTTPError as error:
            raise _unreachable(self._http.base_url, error) from error
        return _result(call, answer)

    async def health(self) -> Health:
        return await self._send(_HEALTH)

    async def submit(self, task: TaskRequest | dict[str, Any]) -> Accepted:
        return await self._send(_submit(task))

    async def task(self, task_id: str, *, results: bool = True) -> TaskStatus:
        return await self._send(_task(task_id, results))

    async def cancel(self, task_id: str, *, register_if_missing: bool = False) -> TaskStatus:
        return await self._send(_cancel(task_id, register_if_missing))

    async def tasks(self, **filters: Any) -> list[TaskSummary]:
        return (await self._send(_Call("GET", "/tasks", _Tasks, _params(**filters)))).tasks

    async def sessions(self, task_id: str) -> list[SessionSummary]:
        return (await self._send(_sessions(task_id))).sessions

    async def log(self, task_id: str, session_id: str, attempt: int | None = None) -> bytes:
        return await self._send(_log(task_id, session_id, attempt))

    async def nodes(self) -> list[GatewayNodeInfo]:
        return (await self._send(_NODES)).nodes

    async def pause(self, mode: str = "drain", timeout_seconds: float = 300.0) -> dict[str, Any]:
        return await self._send(_pause(mode, timeout_seconds))

    async def resume(self) -> dict[str, Any]:
        return await self._send(_RESUME)

    async def wait(self, task_id: str, *, timeout: float | None = None) -> TaskStatus:
        pause = _FIRST_LOOK
        try:
            async with asyncio.timeout(timeout):
                while not (await self.task(task_id, results=False)).status.terminal:
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_LOOK)
        except TimeoutError as error:
            raise TimeoutError(f"the task {task_id} is not over after {timeout} s") from error
        return await self.task(task_id)

    async def events(self) -> AsyncIterator[Event]:
        async with self._http.stream("GET", "/events", timeout=None) as answer:
            async for line in answer.aiter_lines():
                event = _event(line)
                if event is not None:
                    yield event
