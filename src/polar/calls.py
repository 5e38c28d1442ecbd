"""Each call of the rollout server's API, written once: what is asked, and what the answer says. `client.py` sends them.

An answer may be msgpack or JSON: whatever says so in its Content-Type, also from another implementation of the API.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Generic, Literal, TypeVar
from urllib.parse import quote

import httpx
import msgspec

from polar.codec import from_json, from_msgpack
from polar.records import Event, GatewayNodeInfo, SessionResult, SessionSummary, TaskStatus
from polar.replies import Accepted, Health, InferenceStatus, Nodes, RolloutStatus, Sessions, Tasks
from polar.requests import TaskRequest

T = TypeVar("T")
_SHOWN = 300
"""characters of an answer that nobody expected"""


class ClientError(Exception):
    """`status` is the HTTP status, None where the server did not answer, or broke off."""

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.status = status


class Call(msgspec.Struct, Generic[T]):
    """`patience`: seconds that the server may take beyond what is usual."""

    method: str
    path: str
    kind: type[T]
    params: dict[str, str] = {}
    body: bytes | None = None
    patience: float = 0.0


class Submitted(Accepted, kw_only=True):
    ignored: str = ""
    """fields of the task that the server does not know"""


def health() -> Call[Health]:
    return Call("GET", "/health", Health)


def submit(task: TaskRequest | dict[str, Any]) -> Call[Submitted]:
    """May be repeated: the same task under the same id is one task. What was left at its default is not sent."""
    document = task.model_dump(mode="json", exclude_unset=True) if isinstance(task, TaskRequest) else task
    return Call("POST", "/rollout/task/submit", Submitted, body=json.dumps(document).encode())


def task(task_id: str, *, results: bool = True) -> Call[TaskStatus]:
    return Call("GET", f"/rollout/task/{_quoted(task_id)}", TaskStatus, _params(results=results))


def cancel(task_id: str, *, register_if_missing: bool = False) -> Call[TaskStatus]:
    """With `register_if_missing` a submit that is still under way is refused when it arrives."""
    params = _params(register_if_missing=register_if_missing)
    return Call("DELETE", f"/rollout/task/{_quoted(task_id)}", TaskStatus, params)


def tasks(
    *, status: str | None = None, harness: str | None = None, since: float | None = None, limit: int | None = None
) -> Call[Tasks]:
    """The newest first; `since`: changed at this time of the epoch, in seconds, or later."""
    return Call("GET", "/tasks", Tasks, _params(status=status, harness=harness, since=since, limit=limit))


def request(task_id: str) -> Call[dict[str, Any]]:
    """The TaskRequest that the task was submitted with."""
    return Call("GET", f"/tasks/{_quoted(task_id)}/request", dict[str, Any])


def sessions(task_id: str) -> Call[Sessions]:
    return Call("GET", f"/tasks/{_quoted(task_id)}/sessions", Sessions)


def session(task_id: str, session_id: str) -> Call[SessionResult]:
    """409 for one that is not over."""
    return Call("GET", f"/tasks/{_quoted(task_id)}/sessions/{_quoted(session_id)}", SessionResult)


def find_session(session_id: str) -> Call[SessionSummary]:
    """Where only the session's id is known: it names the task."""
    return Call("GET", f"/sessions/{_quoted(session_id)}", SessionSummary)


def log(task_id: str, session_id: str, *, attempt: int | None = None) -> Call[bytes]:
    """The packed session log of the accepted attempt, or of this one."""
    path = f"/tasks/{_quoted(task_id)}/sessions/{_quoted(session_id)}/log"
    return Call("GET", path, bytes, _params(attempt=attempt))


def status() -> Call[RolloutStatus]:
    return Call("GET", "/rollout/status", RolloutStatus)


def nodes() -> Call[Nodes]:
    return Call("GET", "/nodes", Nodes)


def node(node_id: str) -> Call[GatewayNodeInfo]:
    return Call("GET", f"/nodes/{_quoted(node_id)}", GatewayNodeInfo)


def drain(node_id: str) -> Call[GatewayNodeInfo]:
    """The gateway gets no more sessions, until it starts anew; those it has go on."""
    return Call("DELETE", f"/nodes/{_quoted(node_id)}", GatewayNodeInfo)


def pause(mode: Literal["drain", "abort"] = "drain", *, timeout_seconds: float = 300.0) -> Call[InferenceStatus]:
    """Returns once every gateway has paused; ends by itself after `timeout_seconds`."""
    params = _params(mode=mode, timeout_seconds=timeout_seconds)
    return Call("POST", "/rollout/inference/pause", InferenceStatus, params, patience=timeout_seconds)


def resume() -> Call[InferenceStatus]:
    return Call("POST", "/rollout/inference/resume", InferenceStatus)


def inference_status() -> Call[InferenceStatus]:
    return Call("GET", "/rollout/inference/status", InferenceStatus)


def result(call: Call[T], answer: httpx.Response) -> T:
    """Raises ClientError, in the server's words where it has some."""
    check(answer)
    if call.kind is bytes:
        return answer.content  # type: ignore[return-value]
    document = _document(answer, call.kind)
    if isinstance(document, Submitted):
        document.ignored = answer.headers.get("X-Polar-Ignored", "")
    return document


def check(answer: httpx.Response) -> None:
    """Raises ClientError for anything but a 2xx; the answer has been read."""
    if answer.is_redirect:
        raise ClientError(f"{answer.url} leads to {answer.headers['Location']}: use that address", answer.status_code)
    if not answer.is_success:
        raise ClientError(_detail(answer), answer.status_code)


def event(line: str) -> Event | None:
    """Of one line of the events stream; None for the lines between."""
    field, _, value = line.partition(":")
    if field != "data":
        return None
    try:
        return from_json(value, Event)
    except msgspec.MsgspecError as error:
        raise ClientError(f"an event that is none: {error}: {line[:_SHOWN]}") from error


def unreachable(url: httpx.URL, error: httpx.HTTPError) -> ClientError:
    if isinstance(error, httpx.TimeoutException):
        return ClientError(f"the rollout server {url} does not answer in time ({type(error).__name__})")
    if isinstance(error, httpx.RemoteProtocolError | httpx.ReadError | httpx.DecodingError):
        return ClientError(f"the rollout server {url} broke off its answer: {error or type(error).__name__}")
    return ClientError(f"the rollout server {url} does not answer: {error or type(error).__name__}")


def _quoted(name: str) -> str:
    return quote(name, safe="")


def _params(**values: Any) -> dict[str, str]:
    return {
        key: str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in values.items()
        if value is not None
    }


def _document(answer: httpx.Response, kind: type[T]) -> T:
    media = answer.headers.get("Content-Type", "").split(";")[0].strip()
    try:
        if media == "application/msgpack":
            return from_msgpack(answer.content, kind)
        if media == "application/json":
            return from_json(answer.content, kind)
        problem = f"{media or 'no type'}: {' '.join(answer.text[:_SHOWN].split())}"
    except msgspec.MsgspecError as error:
        problem = str(error)
    raise ClientError(f"{answer.url} answers, but not as a rollout server does: {problem}", answer.status_code)


def _detail(answer: httpx.Response) -> str:
    try:
        detail = answer.json()["detail"]
        if isinstance(detail, list):
            return "; ".join(_mistakes(detail))
    except (ValueError, KeyError, TypeError):
        detail = None
    if answer.status_code == 404 and detail in (None, "Not Found"):
        return f"{answer.url}: there is nothing at this address (404); is it a rollout server's?"
    if detail is None:
        return f"{answer.status_code} from {answer.url}: {' '.join(answer.text[:_SHOWN].split())}"
    return str(detail)


def _mistakes(detail: list[Any]) -> Iterator[str]:
    for item in detail:
        yield f"{'.'.join(map(str, item['loc'][1:]))}: {item['msg']}"
