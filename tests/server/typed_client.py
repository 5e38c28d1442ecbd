"""A program that uses the Python client, as a type checker sees it: every call's answer has its type. It is checked,
and never run."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any, assert_type

from polar.client import AsyncClient, Client, Submitted
from polar.records import Event, GatewayNodeInfo, SessionResult, SessionSummary, TaskState, TaskStatus
from polar.replies import Health, InferenceStatus, Nodes, RolloutStatus, Sessions, Tasks
from polar.requests import TaskRequest


def report(status: TaskStatus) -> None:
    print(status.completed_sessions)


def use(client: Client, request: TaskRequest) -> None:
    assert_type(client.health(), Health)
    assert_type(client.submit(request), Submitted)
    assert_type(client.submit({"task_id": "a"}).ignored, str)
    assert_type(client.task("a", results=False), TaskStatus)
    assert_type(client.wait("a", timeout=1.0, progress=report).status, TaskState)
    assert_type(client.cancel("a", register_if_missing=True), TaskStatus)
    assert_type(client.tasks(status="running", since=1.5, limit=3), Tasks)
    assert_type(client.request("a"), dict[str, Any])
    assert_type(client.sessions("a"), Sessions)
    assert_type(client.session("a", "s"), SessionResult)
    assert_type(client.find_session("s"), SessionSummary)
    assert_type(client.log("a", "s", attempt=2), bytes)
    assert_type(client.status(), RolloutStatus)
    assert_type(client.nodes(), Nodes)
    assert_type(client.node("n"), GatewayNodeInfo)
    assert_type(client.drain("n"), GatewayNodeInfo)
    assert_type(client.pause("abort", timeout_seconds=3.0), InferenceStatus)
    assert_type(client.resume(), InferenceStatus)
    assert_type(client.inference_status().waiting_for, list[str])
    assert_type(client.events(), Iterator[Event])


async def use_async(client: AsyncClient, request: TaskRequest) -> None:
    assert_type(await client.submit(request), Submitted)
    assert_type(await client.wait("a", progress=report), TaskStatus)
    assert_type(await client.session("a", "s"), SessionResult)
    assert_type(await client.pause(), InferenceStatus)
    assert_type(client.events(), AsyncIterator[Event])
    async with AsyncClient("http://127.0.0.1:8080", "token", timeout=None) as another:
        assert_type(await another.status(), RolloutStatus)


def misuse(client: Client) -> None:
    client.pause("sleep")  # type: ignore[arg-type]
    client.session("a")  # type: ignore[call-arg]
    client.task(results=False)  # type: ignore[call-arg]
