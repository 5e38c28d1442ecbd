"""Many at once: the same result sent twice is one result, and what comes together is saved together."""

from __future__ import annotations

import asyncio
import hashlib
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
from tests.peers.node import done
from tests.server.conftest import TOKEN, Server, task

from polar.codec import from_msgpack
from polar.config import TOKEN_HEADER
from polar.nodeapi import ResultReply
from polar.records import SessionResult

SENDERS, ROUNDS = 4, 5


def test_same_result_sent_at_once_has_one_answer_and_a_whole_file(server: Server) -> None:
    node = server.node()
    log = bytes(500_000)
    text = "x" * 2_000_000
    with ThreadPoolExecutor(SENDERS) as senders:
        for turn in range(ROUNDS):
            server.submit(f"twice-{turn}")
            (lease,) = node.lease()
            node.upload(lease, log)
            result = done(lease, node, log_sha256=hashlib.sha256(log).hexdigest(), harness_log=text)
            together = threading.Barrier(SENDERS)

            def send(_: int, result=result, together=together) -> ResultReply:
                together.wait()
                return server.node().result(result)

            answers = list(senders.map(send, range(SENDERS)))
            assert {(answer.accepted, answer.winner) for answer in answers} == {(True, 1)}
            (file,) = (server.folder / "tasks" / f"twice-{turn}").iterdir()
            assert from_msgpack(file.read_bytes(), SessionResult).metadata["harness_log"] == text
            assert (server.folder / "logs" / f"{lease.session_id}.1.zst").read_bytes() == log
            assert not list(server.folder.glob("logs/*.part"))


def test_submits_that_come_together_are_saved_together(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.submit("first")
    before = transactions(server.folder / "polar.db")
    assert asyncio.run(submit_at_once(server, 200)) == {200}
    taken = transactions(server.folder / "polar.db") - before
    server.restart()
    assert len(server.http.get("/rollout/status").json()["tasks"]) == 201
    assert taken <= 20, "a transaction costs the disk a sync"


async def submit_at_once(server: Server, count: int) -> set[int]:
    limits = httpx.Limits(max_connections=count)
    async with httpx.AsyncClient(
        base_url=server.url, headers={TOKEN_HEADER: TOKEN}, limits=limits, timeout=60, trust_env=False
    ) as http:
        posts = (http.post("/rollout/task/submit", json=task(f"task-{number}")) for number in range(count))
        return {answer.status_code for answer in await asyncio.gather(*posts)}


def transactions(database: Path) -> int:
    """SQLite's count of transactions so far, out of the header of its shared memory."""
    return int.from_bytes(database.with_name(f"{database.name}-shm").read_bytes()[8:12], "little")
