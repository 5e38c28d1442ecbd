"""What the rollout server costs, each number beside a floor: coming back with 10,000 tasks on record, and carrying
sessions from submit to result.

A start is the time from spawning `polar server` until /health answers; its floor is a Python that imports the server
and opens the same database. The tasks have four sessions each; their files are left out, since a start reads none.
For throughput a scripted gateway takes the sessions, and hands in a log and a trace of 4,000 tokens each; the floor is
a bare FastAPI app that commits one row to SQLite a request, called by the same client as often.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
from msgspec.structs import replace

from polar.codec import from_msgpack, to_msgpack
from polar.config import TOKEN_HEADER, TOKEN_VARIABLE
from polar.nodeapi import EngineState, Lease, NodeResult, PollRequest, Workers, WorkReply, WorkRequest
from polar.records import CallCounts, GatewayMetrics, SessionStatus, TaskState, Termination, TokenLedger, Trace
from polar.requests import TaskRequest
from polar.server import submission
from polar.server.state import Attempt, AttemptState, Node, Session, Task
from polar.server.tables import Tables

TASKS, SESSIONS, OPEN = 10_000, 4, 2_000
SERVED, AT_ONCE = 500, 64
TRACE = 4_000
TOKEN = "token-of-the-benchmark"
LOG = os.urandom(20_000)
ROOM = Workers(init=AT_ONCE, run=AT_ONCE, postrun=AT_ONCE)
ENGINE = EngineState(kind="scripted", healthy=True)
AGENT = {"harness": "shell", "custom_shell": {"command": "true"}}
POLAR = [sys.executable, "-c", "from polar.cli.main import main; main()"]
FLOOR_APP = """
import asyncio, sqlite3, sys, uvicorn
from concurrent.futures import ThreadPoolExecutor
from fastapi import FastAPI, Request

app, writer = FastAPI(), ThreadPoolExecutor(1)
db = sqlite3.connect(sys.argv[1], isolation_level=None, check_same_thread=False)
db.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL; CREATE TABLE t (size INTEGER)")

@app.get("/health")
async def health(): return {}

@app.post("/")
async def save(request: Request):
    size = len(await request.body())
    await asyncio.get_running_loop().run_in_executor(writer, db.execute, "INSERT INTO t VALUES (?)", (size,))
    return {}

uvicorn.run(app, port=int(sys.argv[2]), log_config=None, access_log=False)
"""


# A folder with a past


def fill(folder: Path, open_tasks: int) -> None:
    """`open_tasks` of the tasks still run: each has a session that is over, two that are leased, one that waits."""
    tables = Tables(str(folder / "polar.db"))
    document = {"task_id": "task", "instruction": "x" * 500, "agent": AGENT, "num_samples": SESSIONS}
    template = submission.new_task(TaskRequest.model_validate(document), 0.0, 0.0)
    rows: list[Any] = [Node(node_id="node-0", epoch=1, gateway_url="", workers=ROOM, engine=ENGINE)]
    for number in range(TASKS):
        task = copied(template, f"task-{number}")
        over = SESSIONS if number >= open_tasks else 1
        rows += [task, *task.sessions]
        rows += [attempt for session in task.sessions if (attempt := live_through(session, over)) is not None]
        if over == SESSIONS:
            task.status, task.completed_sessions, task.ended_at = TaskState.COMPLETED, SESSIONS, 1.0
    tables.commit([(type(row), tables.values(row)) for row in rows], 1.0)
    tables.close()


def copied(task: Task, task_id: str) -> Task:
    names = [f"{task_id}-s{session.index}" for session in task.sessions]
    sessions = [replace(row, session_id=name, task_id=task_id) for name, row in zip(names, task.sessions, strict=True)]
    return replace(task, task_id=task_id, sessions=sessions)


def live_through(session: Session, over: int) -> Attempt | None:
    if session.index == SESSIONS - 1 and over < SESSIONS:
        return None
    attempt = Attempt(session_id=session.session_id, number=1, node_id="node-0", epoch=1, leased_at=0.0, expires_at=1.0)
    if session.index < over:
        attempt.state, attempt.sampled_tokens = AttemptState.WON, 3
        session.status, session.termination, session.winner = SessionStatus.COMPLETED, Termination.DONE, 1
        session.reward, session.traces, session.completions = 1.0, 1, 1
    return attempt


def ended(session_id: str, tokens: int = 3, **facts: Any) -> NodeResult:
    trace = Trace(
        prompt_ids=np.arange(tokens),
        response_ids=np.arange(tokens),
        loss_mask=np.ones(tokens),
        response_logprobs=-np.ones(tokens),
        finish_reason="stop",
        reward=1.0,
    )
    return NodeResult(
        session_id=session_id,
        attempt=1,
        node_id="node-0",
        epoch=1,
        status=SessionStatus.COMPLETED,
        termination=Termination.DONE,
        traces=[trace],
        tokens=TokenLedger(sampled=tokens, trainable=tokens),
        calls=CallCounts(completions=1),
        **facts,
    )


# Processes


@contextmanager
def answering(command: list[str], url: str) -> Iterator[float]:
    """A process, from its first answer on; yields the seconds until then."""
    began = time.perf_counter()
    process = subprocess.Popen(command, env=os.environ | {TOKEN_VARIABLE: TOKEN}, stdout=subprocess.DEVNULL)
    try:
        while not answers(f"{url}/health"):
            assert process.poll() is None, f"{command} has ended"
            time.sleep(0.005)
        yield time.perf_counter() - began
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers={TOKEN_HEADER: TOKEN}), timeout=30) as answer:
            return answer.status == 200
    except urllib.error.URLError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def polar_server(folder: Path) -> tuple[list[str], str]:
    port = free_port()
    return [*POLAR, "server", "--data", str(folder), "--port", str(port)], f"http://127.0.0.1:{port}"


def start_seconds(folder: Path) -> float:
    with answering(*polar_server(folder)) as seconds:
        return seconds


def floor_start_seconds(folder: Path) -> float:
    look = "import polar.cli.main, polar.server, sqlite3, sys; sqlite3.connect(sys.argv[1]).execute('SELECT 1')"
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", look, str(folder / "polar.db")], check=True)
    return time.perf_counter() - began


def measure_start(open_tasks: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, open_tasks)
        seconds = min(start_seconds(folder) for _ in range(2))
        floor = min(floor_start_seconds(folder) for _ in range(2))
    return {"tasks": TASKS, "open": open_tasks, "seconds": round(seconds, 2), "to_floor": round(seconds / floor, 2)}


# Throughput


async def carry_through(http: aiohttp.ClientSession) -> int:
    """SERVED tasks of one session each, from submit to result; returns the number of requests it took."""
    poll = PollRequest(
        node_id="node-0",
        epoch=1,
        gateway_url="",
        workers=ROOM,
        room=ROOM,
        metrics=GatewayMetrics(),
        engine=ENGINE,
        harnesses=["shell"],
        runtimes=["bubblewrap"],
    )
    await call(http, "POST", "/node/poll", to_msgpack(poll))
    waiting = iter(range(SERVED))
    asks = 0
    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(submit_each(http, waiting))
        leased = 0
        while leased < SERVED:
            ask = WorkRequest(node_id="node-0", epoch=1, room=ROOM)
            reply = from_msgpack(await call(http, "POST", "/node/work", to_msgpack(ask)), WorkReply)
            asks, leased = asks + 1, leased + len(reply.leases)
            for lease in reply.leases:
                group.create_task(hand_in(http, lease))
    return 3 * SERVED + asks


async def submit_each(http: aiohttp.ClientSession, numbers: Iterator[int]) -> None:
    for number in numbers:
        task = {"task_id": f"served-{number}", "instruction": "x" * 500, "agent": AGENT}
        await call(http, "POST", "/rollout/task/submit", json.dumps(task).encode())


async def hand_in(http: aiohttp.ClientSession, lease: Lease) -> None:
    path = f"/node/sessions/{lease.session_id}/1"
    await call(http, "PUT", f"{path}/log?offset=0", LOG)
    result = ended(lease.session_id, TRACE // 2, log_sha256=hashlib.sha256(LOG).hexdigest())
    await call(http, "POST", f"{path}/result", to_msgpack(result))


async def call(http: aiohttp.ClientSession, method: str, path: str, body: bytes) -> bytes:
    headers = {TOKEN_HEADER: TOKEN, "Content-Type": "application/json"}
    async with http.request(method, path, data=body, headers=headers) as answer:
        answer.raise_for_status()
        return await answer.read()


async def call_bare(http: aiohttp.ClientSession) -> int:
    bodies = iter([to_msgpack(ended("session", TRACE // 2))] * (3 * SERVED))

    async def each() -> None:
        for body in bodies:
            await call(http, "POST", "/", body)

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(each())
    return 3 * SERVED


def rate(url: str, work: Callable[[aiohttp.ClientSession], Coroutine[Any, Any, int]]) -> tuple[float, float]:
    """Requests a second, and the seconds it took."""

    async def timed() -> tuple[float, float]:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(url, connector=connector) as http:
            began = time.perf_counter()
            requests = await work(http)
            seconds = time.perf_counter() - began
            return requests / seconds, seconds

    return asyncio.run(timed())


def measure_throughput() -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        command, url = polar_server(Path(name))
        with answering(command, url):
            requests, seconds = rate(url, carry_through)
        port = free_port()
        bare, url = [sys.executable, "-c", FLOOR_APP, f"{name}/bare.db", str(port)], f"http://127.0.0.1:{port}"
        with answering(bare, url):
            floor, _ = rate(url, call_bare)
    return {
        "sessions_per_second": round(SERVED / seconds, 1),
        "requests_per_second": round(requests, 1),
        "floor_requests_per_second": round(floor, 1),
        "request_to_floor": round(floor / requests, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = {"starts": [measure_start(0), measure_start(OPEN)], "throughput": measure_throughput()}
    if arguments.json:
        print(json.dumps(found))
        return
    for row in found["starts"]:
        print(f"start, {row['tasks']:,} tasks, {row['open']:,} open: {row['seconds']} s, {row['to_floor']} × floor")
    row = found["throughput"]
    print(
        f"{row['sessions_per_second']} sessions/s from submit to result, {row['requests_per_second']} requests/s: ",
        end="",
    )
    print(f"{row['request_to_floor']} × floor ({row['floor_requests_per_second']} requests/s)")


if __name__ == "__main__":
    main()
