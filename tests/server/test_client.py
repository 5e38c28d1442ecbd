"""The Python client in both its forms: against a real server, against another implementation of the API, and against
what is no server at all."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.peers.node import Node
from tests.peers.other_server import FAULTS, other_server
from tests.server.conftest import TOKEN, Server, eventually, task

from polar.client import AsyncClient, Client, ClientError
from polar.records import Event, TaskState, TaskStatus
from polar.requests import TaskRequest


def test_client_sees_a_task_through(server: Server) -> None:
    node = server.node()
    node.poll()
    with Client(server.url, TOKEN) as client:
        assert client.health().nodes == 1
        accepted = client.submit(task("sync") | {"surprise": 1})
        assert (accepted.status, accepted.ignored) == (TaskState.RUNNING, "surprise")
        (lease,) = node.lease()
        with pytest.raises(ClientError, match="the session is not over") as early:
            client.session("sync", lease.session_id)
        assert early.value.status == 409
        node.finish(lease, reward=0.5)
        status = client.wait("sync", timeout=20)
        assert status.results[0].trajectory is not None
        assert status.results[0].trajectory.traces[0].response_ids.dtype == "int32"
        assert client.sessions("sync").sessions[0].reward == 0.5
        assert client.session("sync", lease.session_id).session_id == lease.session_id
        assert client.request("sync")["instruction"] == "say hello"
        assert client.log("sync", lease.session_id) == f"log of {lease.session_id}.1".encode()
        assert [row.mean_reward for row in client.tasks(status="completed", limit=1).tasks] == [0.5]
        assert client.nodes().nodes[0].node_id == "node-a"
        assert client.cancel("sync").status is TaskState.COMPLETED
        assert client.status().tasks["sync"] is TaskState.COMPLETED


def test_async_client_does_the_same(server: Server) -> None:
    async def through() -> None:
        async with AsyncClient(server.url, TOKEN) as client:
            await client.submit(TaskRequest.model_validate(task("async")))
            lease = (await asyncio.to_thread(node.lease))[0]
            await asyncio.to_thread(node.finish, lease)
            status = await client.wait("async", timeout=20)
            assert status.status is TaskState.COMPLETED
            assert (await client.task("async", results=False)).results == []

    node: Node = server.node()
    asyncio.run(through())


def test_gateways_are_shown_drained_and_paused(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.node("kept").poll()
    with Client(server.url, TOKEN) as client:
        assert client.node("kept").draining is False
        assert client.drain("kept").draining is True
        with pytest.raises(ClientError, match="there is no node none"):
            client.node("none")
        with pytest.raises(ClientError, match="not every gateway paused within") as refused:
            client.pause("abort", timeout_seconds=0.1)
        assert refused.value.status == 504
        assert client.resume().paused is False
        assert client.inference_status().waiting_for == []


def test_pause_may_take_longer_than_other_calls(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    node.poll()
    answers: list[bool] = []
    with Client(server.url, TOKEN, timeout=1.0) as client:
        pausing = threading.Thread(target=lambda: answers.append(client.pause(timeout_seconds=30).paused))
        began = time.monotonic()
        pausing.start()
        orders = eventually(lambda: node.work(0).orders)
        eventually(lambda: time.monotonic() - began > 1.5)
        node.acked = [orders[0].id]
        node.poll()
        pausing.join(20)
    assert answers == [True]


def test_session_is_found_by_its_id_however_many_tasks_are_newer(server: Server) -> None:
    server.submit("needle in a stack")
    for number in range(3):
        server.submit(f"hay-{number}")
    session_id = server.http.get("/tasks/needle in a stack/sessions").json()["sessions"][0]["session_id"]
    with Client(server.url, TOKEN) as client:
        found = client.find_session(session_id)
        assert (found.task_id, found.session_id) == ("needle in a stack", session_id)
        with pytest.raises(ClientError, match="there is no session none") as missing:
            client.find_session("none")
        assert missing.value.status == 404


def test_events_come_as_they_happen(server: Server) -> None:
    def first_two(told: Any) -> list[Event]:
        hello = next(told)
        server.submit(f"told-{len(names)}")
        return [hello, next(told)]

    async def as_they_come() -> list[Event]:
        async with AsyncClient(server.url, TOKEN) as client:
            told = client.events()
            hello = await anext(told)
            await client.submit(task("told-1"))
            return [hello, await anext(told)]

    names: list[str] = []
    with Client(server.url, TOKEN) as client:
        events = first_two(client.events())
    events += asyncio.run(as_they_come())
    assert [event.type for event in events] == ["hello", "task.created"] * 2
    assert [event.data.get("task_id") for event in events] == [None, "told-0", None, "told-1"]


def test_wait_tells_of_its_looks_and_outlives_a_restart(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    looks: list[TaskStatus] = []
    with Client(server.url, TOKEN) as client:
        client.submit(task("long", num_samples=2))
        first, second = node.lease(2)
        results: list[TaskStatus] = []
        waiting = threading.Thread(
            target=lambda: results.append(client.wait("long", timeout=60, progress=looks.append))
        )
        waiting.start()
        node.finish(first)
        eventually(lambda: looks and looks[-1].completed_sessions == 1)
        server.kill()
        seen = len(looks)
        server.start()
        eventually(lambda: len(looks) > seen)
        node.finish(second)
        waiting.join(60)
    assert len(results[0].results) == 2
    assert [look.results for look in looks] == [[]] * len(looks)
    assert looks[-1].status is TaskState.COMPLETED


def test_errors_carry_the_servers_words(server: Server) -> None:
    server.node().poll()
    with Client(server.url, TOKEN) as client:
        with pytest.raises(ClientError, match="Task not found") as missing:
            client.task("nothing here?")
        assert missing.value.status == 404
        with pytest.raises(ClientError, match="unknown harness 'nonesuch'"):
            client.submit(task("x") | {"agent": {"harness": "nonesuch"}})
        client.submit(task("slow"))
        with pytest.raises(TimeoutError, match="is not over"):
            client.wait("slow", timeout=0.05)
    with Client(server.url, "wrong") as client, pytest.raises(ClientError, match="wrong control token") as refused:
        next(client.events())
    assert refused.value.status == 401


def test_server_that_is_not_there_is_named() -> None:
    for url in ("http://127.0.0.1:9", "http://nosuch.invalid", "localhost:8080"):
        with Client(url) as client, pytest.raises(ClientError, match="does not answer") as gone:
            client.health()
        assert gone.value.status is None
    with pytest.raises(ClientError, match="is no URL"):
        Client("http://a:b")


def test_another_implementation_is_understood() -> None:
    """It answers JSON, knows nothing of what is our own, and is sent only what the caller has said."""
    with other_server() as other, Client(other.url) as client:
        assert client.health().nodes == 1
        accepted = client.submit(TaskRequest.model_validate(task("t")))
        assert (accepted.status, accepted.ignored) == (TaskState.RUNNING, "")
        assert other.seen == [task("t")]
        looks: list[int] = []
        status = client.wait("t", timeout=20, progress=lambda known: looks.append(known.completed_sessions))
        assert looks == [0, 0, 1]
        (result,) = status.results
        assert result.trajectory is not None
        trace = result.trajectory.traces[0]
        assert (trace.response_ids.dtype, trace.response_ids.tolist()) == ("int32", [3, 4])
        assert trace.response_logprobs is not None
        assert trace.response_logprobs.tolist() == [-0.5, -1.0]
        assert (trace.weight_versions, result.timing.run_ms, result.timing.e2e_ms) == ([], 3.0, None)
        assert client.cancel("t").status is TaskState.COMPLETED
        assert client.tasks(harness="shell").tasks[0].mean_reward == 1.0
        assert client.sessions("t").sessions[0].reward == 1.0
        assert client.status().storage is None
        assert client.node("gpu-1") == client.drain("gpu-1") == client.nodes().nodes[0]
        assert [event.type for event in client.events()] == ["hello", "task.created", "task.completed"]
        with pytest.raises(ClientError) as unknown:
            client.pause()
        assert unknown.value.status == 404
        assert unknown.value.message.endswith("nothing at this address (404); is it a rollout server's?")


WORDS = {
    "html": ("as a rollout server does: text/html: <html>Sign in</html>", 200),
    "bad gateway": ("502 from http.*: <h1>Bad gateway</h1>", 502),
    "redirect": ("leads to http://elsewhere/: use that address", 307),
    "half": ("broke off its answer", None),
    "nothing": ("broke off its answer", None),
    "noise": ("broke off its answer", None),
    "other document": ("as a rollout server does: .*missing required field `status`", 200),
    "no event": ("as a rollout server does: text/event-stream", 200),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_what_is_no_answer_of_a_rollout_server_is_told_as_such(fault: str) -> None:
    async def ask(url: str) -> None:
        async with AsyncClient(url) as client:
            await client.health()

    words, status = WORDS[fault]
    with other_server() as other:
        other.fault = fault
        with Client(other.url) as client, pytest.raises(ClientError, match=words) as told:
            client.health()
        assert told.value.status == status
        with pytest.raises(ClientError, match=words):
            asyncio.run(ask(other.url))


@pytest.mark.parametrize("fault", ["html", "bad gateway", "half", "nothing", "no event"])
def test_stream_that_is_none_is_an_error_or_ends(fault: str) -> None:
    with other_server() as other:
        other.fault = fault
        with Client(other.url) as client:
            if fault == "html":
                assert list(client.events()) == []
                return
            with pytest.raises(ClientError):
                list(client.events())


def test_server_that_hangs_is_given_up_in_time() -> None:
    async def ask(url: str) -> None:
        async with AsyncClient(url, timeout=0.3) as client:
            await client.health()

    with other_server() as other:
        other.fault = "hang"
        began = time.monotonic()
        with (
            Client(other.url, timeout=0.3) as client,
            pytest.raises(ClientError, match="does not answer in time") as told,
        ):
            client.health()
        assert told.value.status is None
        with pytest.raises(ClientError, match="does not answer in time"):
            asyncio.run(ask(other.url))
        assert time.monotonic() - began < 20
