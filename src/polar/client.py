"""The rollout server's API for Python programs: `Client`, and `AsyncClient` with the same methods to await.

A call that fails raises ClientError with the server's own words. Documents travel as msgpack with packed arrays from
servers that offer it. `wait` outlives a restart of the server.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import httpx

from polar import calls
from polar.calls import Call, ClientError, Submitted
from polar.records import Event, TaskStatus

__all__ = ["AsyncClient", "Client", "ClientError", "Submitted"]
T = TypeVar("T")
P = ParamSpec("P")
Progress = Callable[[TaskStatus], None]
_HEADERS = {"Accept": "application/msgpack, application/json;q=0.9", "Content-Type": "application/json"}
_EVENTS = {"Accept": "text/event-stream"}
_SILENCE_SECONDS = 45.0
"""three pings"""
_FIRST_LOOK, _LONGEST_LOOK, AWAY_SECONDS = 0.1, 2.0, 60.0


def _settings(url: str, token: str | None, timeout: float | None) -> dict[str, Any]:
    try:
        httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ClientError(f"{url!r} is no URL: {error}") from error
    token = token or os.environ.get("POLAR_CONTROL_PLANE_TOKEN")
    headers = _HEADERS | ({"X-Polar-Control-Token": token} if token else {})
    return {"base_url": url.rstrip("/"), "headers": headers, "timeout": timeout}


def _request(http: httpx.Client | httpx.AsyncClient, call: Call[T]) -> httpx.Request:
    usual = http.timeout.read
    timeout = _patient(http, usual + call.patience if usual is not None else None)
    return http.build_request(call.method, call.path, params=call.params, content=call.body, timeout=timeout)


def _patient(http: httpx.Client | httpx.AsyncClient, seconds: float | None) -> httpx.Timeout:
    usual = http.timeout
    return httpx.Timeout(connect=usual.connect, read=seconds, write=usual.write, pool=usual.pool)


@contextmanager
def _reached(http: httpx.Client | httpx.AsyncClient) -> Iterator[None]:
    try:
        yield
    except httpx.HTTPError as error:
        raise calls.unreachable(http.base_url, error) from error


class _Watch:
    """When to look at a task again, and when to give it up."""

    def __init__(self, task_id: str, timeout: float | None) -> None:
        self._task_id = task_id
        self._timeout = timeout
        self._deadline = float("inf") if timeout is None else time.monotonic() + timeout
        self._pause = _FIRST_LOOK
        self._away_since: float | None = None

    def seen(self) -> None:
        self._away_since = None

    def missed(self, error: ClientError) -> None:
        """Raises it again where it will not pass, or has not passed for AWAY_SECONDS."""
        now = time.monotonic()
        self._away_since = self._away_since or now
        passing = error.status is None or error.status in (502, 503, 504)
        if not passing or now - self._away_since > AWAY_SECONDS:
            raise error

    def pause(self) -> float:
        """Seconds until the next look. Raises TimeoutError when the time is over."""
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError(f"the task {self._task_id} is not over after {self._timeout} s")
        pause, self._pause = min(self._pause, left), min(2 * self._pause, _LONGEST_LOOK)
        return pause


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
    """`token` None: POLAR_CONTROL_PLANE_TOKEN, where it is set. `timeout`: seconds for each step of a call. A context
    manager."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float | None = 60.0) -> None:
        self._http = httpx.Client(**_settings(url, token, timeout))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def send(self, call: Call[T]) -> T:
        with _reached(self._http):
            answer = self._http.send(_request(self._http, call))
        return calls.result(call, answer)

    health, status = _now(calls.health), _now(calls.status)
    submit, task, cancel = _now(calls.submit), _now(calls.task), _now(calls.cancel)
    tasks, request, sessions = _now(calls.tasks), _now(calls.request), _now(calls.sessions)
    session, find_session, log = _now(calls.session), _now(calls.find_session), _now(calls.log)
    nodes, node, drain = _now(calls.nodes), _now(calls.node), _now(calls.drain)
    pause, resume, inference_status = _now(calls.pause), _now(calls.resume), _now(calls.inference_status)

    def wait(self, task_id: str, *, timeout: float | None = None, progress: Progress | None = None) -> TaskStatus:
        """The task with its results once it is terminal; `progress` is called with each look at it. Raises TimeoutError
        after `timeout` seconds, ClientError when the server has been away for AWAY_SECONDS."""
        watch = _Watch(task_id, timeout)
        while True:
            try:
                known = self.task(task_id, results=False)
                watch.seen()
                if progress is not None:
                    progress(known)
                if known.status.terminal:
                    return self.task(task_id)
            except ClientError as error:
                watch.missed(error)
            time.sleep(watch.pause())

    def events(self) -> Iterator[Event]:
        """What happens from now on, until the server lets go: then, or after a ClientError, ask again; a `hello` says
        that something may have been missed."""
        timeout = _patient(self._http, _SILENCE_SECONDS)
        with (
            _reached(self._http),
            self._http.stream("GET", "/events", headers=_EVENTS, timeout=timeout) as answer,
        ):
            if not answer.is_success:
                answer.read()
                calls.check(answer)
            for line in answer.iter_lines():
                if (event := calls.event(line)) is not None:
                    yield event


class AsyncClient:
    """As Client."""

    def __init__(self, url: str, token: str | None = None, *, timeout: float | None = 60.0) -> None:
        self._http = httpx.AsyncClient(**_settings(url, token, timeout))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    async def send(self, call: Call[T]) -> T:
        with _reached(self._http):
            answer = await self._http.send(_request(self._http, call))
        return calls.result(call, answer)

    health, status = _soon(calls.health), _soon(calls.status)
    submit, task, cancel = _soon(calls.submit), _soon(calls.task), _soon(calls.cancel)
    tasks, request, sessions = _soon(calls.tasks), _soon(calls.request), _soon(calls.sessions)
    session, find_session, log = _soon(calls.session), _soon(calls.find_session), _soon(calls.log)
    nodes, node, drain = _soon(calls.nodes), _soon(calls.node), _soon(calls.drain)
    pause, resume, inference_status = _soon(calls.pause), _soon(calls.resume), _soon(calls.inference_status)

    async def wait(self, task_id: str, *, timeout: float | None = None, progress: Progress | None = None) -> TaskStatus:
        watch = _Watch(task_id, timeout)
        while True:
            try:
                known = await self.task(task_id, results=False)
                watch.seen()
                if progress is not None:
                    progress(known)
                if known.status.terminal:
                    return await self.task(task_id)
            except ClientError as error:
                watch.missed(error)
            await asyncio.sleep(watch.pause())

    async def events(self) -> AsyncIterator[Event]:
        timeout = _patient(self._http, _SILENCE_SECONDS)
        with _reached(self._http):
            async with self._http.stream("GET", "/events", headers=_EVENTS, timeout=timeout) as answer:
                if not answer.is_success:
                    await answer.aread()
                    calls.check(answer)
                async for line in answer.aiter_lines():
                    if (event := calls.event(line)) is not None:
                        yield event
