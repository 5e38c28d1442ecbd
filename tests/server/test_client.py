"""The Python client against a real server, in both its forms."""

from __future__ import annotations

import asyncio

import pytest
from tests.peers.node import Node
from tests.server.conftest import TOKEN, Server, task

from polar.client import AsyncClient, Client, ClientError
from polar.records import TaskState
from polar.requests import TaskRequest


def test_client_sees_a_task_through(server: Server) -> None:
    node = server.node()
    node.poll()
    with Client(server.url, TOKEN) as client:
        assert client.health().nodes == 1
        accepted = client.submit(task("sync") | {"surprise": 1})
        assert (accepted.status, accepted.ignored) == (TaskState.RUNNING, "surprise")
        (lease,) = node.lease()
        node.finish(lease, reward=0.5)
        status = client.wait("sync", timeout=20)
        assert status.results[0].trajectory is not None
        assert status.results[0].trajectory.traces[0].response_ids.dtype == "int32"
        assert client.sessions("sync").sessions[0].reward == 0.5
        assert client.log("sync", lease.session_id) == f"log of {lease.session_id}.1".encode()
        assert [row.mean_reward for row in client.tasks(status="completed", limit=1).tasks] == [0.5]
        assert client.nodes().nodes[0].node_id == "node-a"


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


def test_server_that_is_not_there_is_named() -> None:
    with Client("http://127.0.0.1:9") as client, pytest.raises(ClientError, match="does not answer"):
        client.health()
