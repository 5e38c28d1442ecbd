"""What gateways call: polls, requests for work, logs and results. Every call may be repeated after a lost reply.

Plain routes, since these calls are the many: they are msgpack, and no part of the public API's description.
"""

from __future__ import annotations

import asyncio
import os
import time
from typing import Any, TypeVar

import msgspec
from fastapi import HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.routing import Route

from polar.codec import from_msgpack, to_msgpack
from polar.nodeapi import (
    WORK_WAIT_SECONDS,
    NodeResult,
    PollReply,
    PollRequest,
    ResultReply,
    Uploaded,
    WorkReply,
    WorkRequest,
)
from polar.public import session_result
from polar.server.core import Core
from polar.server.fleet import StaleEpoch
from polar.server.guard import LOG_BYTES
from polar.server.state import Node, Session, Task

T = TypeVar("T")


def node_routes(core: Core) -> list[Route]:
    api = NodeApi(core)
    attempt = "/node/sessions/{session_id}/{attempt}"
    return [
        Route("/node/poll", api.poll, methods=["POST"]),
        Route("/node/work", api.work, methods=["POST"]),
        Route(f"{attempt}/log", api.upload, methods=["PUT"]),
        Route(f"{attempt}/result", api.result, methods=["POST"]),
    ]


class NodeApi:
    def __init__(self, core: Core) -> None:
        self.core = core

    async def poll(self, request: Request) -> Response:
        core, report = self.core, await _read(request, PollRequest)
        try:
            cancels = core.machine.poll(report, core.now(), time.time())
        except StaleEpoch as stale:
            raise _newer(report.node_id) from stale
        node = core.machine.fleet.nodes[report.node_id]
        leases = [core.lease(attempt) for attempt in core.machine.unheard(node, core.now())]
        await core.settle()
        return _packed(PollReply(epoch=node.epoch, leases=leases, cancels=cancels, orders=node.orders))

    async def work(self, request: Request) -> Response:
        core, asked = self.core, await _read(request, WorkRequest)
        try:
            node = core.machine.ask(asked.node_id, asked.epoch, asked.room, core.now())
        except StaleEpoch as stale:
            raise _newer(asked.node_id) from stale
        if node is None:
            raise HTTPException(503, f"the node {asked.node_id} has to poll before it asks for work")
        return _packed(await self._work(node, request))

    async def _work(self, node: Node, request: Request) -> WorkReply:
        answer = self.core.hold_open(node)
        try:
            await self.core.settle()
            await _first(answer, request)
        finally:
            self.core.let_go(node, answer)
        await self.core.flush()
        return answer.result() if answer.done() else WorkReply()

    async def upload(self, request: Request) -> Response:
        session_id, attempt = request.path_params["session_id"], _number("attempt", request.path_params["attempt"])
        task, session = await self._attempt(session_id, attempt)
        files, offset = self.core.files, _number("offset", request.query_params.get("offset", "0"))
        stands = files.log_size(session_id, attempt)
        if offset > stands or files.log_path(session_id, attempt).exists():
            return _packed(Uploaded(size=stands))
        with self.core.using(task.task_id):
            fd = files.open_log(session_id, attempt)
            try:
                async for chunk in request.stream():
                    if offset + len(chunk) > LOG_BYTES:
                        raise HTTPException(413, f"a session log is at most {LOG_BYTES} bytes")
                    offset += os.pwrite(fd, chunk, offset)
            finally:
                stands = os.fstat(fd).st_size
                os.close(fd)
                self.core.machine.stored(session, attempt, stands)
        return _packed(Uploaded(size=stands))

    async def result(self, request: Request) -> Response:
        core, ended = self.core, await _read(request, NodeResult)
        named = request.path_params["session_id"], _number("attempt", request.path_params["attempt"])
        if (ended.session_id, ended.attempt) != named:
            raise HTTPException(422, "the body speaks of another session or attempt than the path")
        if not ended.status.terminal:
            raise HTTPException(422, f"a result cannot have the status {ended.status}")
        task, session = await self._attempt(ended.session_id, ended.attempt)
        if session.winner == ended.attempt:
            await core.flush()
            return _packed(ResultReply(accepted=True, winner=ended.attempt))
        with core.using(task.task_id):
            size = await run_in_threadpool(_keep, core, task, session, ended)
            core.machine.stored(session, ended.attempt, size)
            answer = core.machine.result(ended, core.now())
        await core.settle()
        return _packed(answer)

    async def _attempt(self, session_id: str, attempt: int) -> tuple[Task, Session]:
        task = await self.core.task_of(session_id)
        session = self.core.machine.sessions.get(session_id)
        if task is None or session is None or session.attempt(attempt) is None:
            raise HTTPException(404, f"attempt {attempt} of the session {session_id} was never leased here")
        return task, session


async def _first(answer: asyncio.Future[WorkReply], request: Request) -> None:
    """Returns when there is an answer, the caller has gone, or the time for holding on is over."""
    gone = asyncio.ensure_future(request.receive())
    either: set[asyncio.Future[Any]] = {answer, gone}
    try:
        await asyncio.wait(either, timeout=WORK_WAIT_SECONDS, return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()


def _keep(core: Core, task: Task, session: Session, ended: NodeResult) -> int:
    """Log and result are on disk when this returns: so many bytes. 503 asks the gateway to send the log once more."""
    sha256 = ended.log_sha256
    if sha256 is not None and not core.files.seal_log(session.session_id, ended.attempt, sha256):
        raise HTTPException(503, "the log with this sha256 is not here: send it again from offset 0, then the result")
    tokens = ended.tokens
    if tokens is not None:
        others = sum(row.sampled_tokens for row in session.attempts if row.number != ended.attempt)
        tokens = msgspec.structs.replace(tokens, attempt_discarded=others)
    whole = msgspec.structs.replace(ended, tokens=tokens)
    public = session_result(whole, task.task_id, session.index, task.num_samples)
    core.files.write_result(public, ended.attempt)
    return core.files.size(task.task_id, session.session_id, ended.attempt)


def _number(what: str, text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 19):
        raise HTTPException(422, f"{what} must be a whole number, not {text[:100]!r}")
    return int(text)


async def _read(request: Request, kind: type[T]) -> T:
    try:
        return from_msgpack(await request.body(), kind)
    except msgspec.MsgspecError as error:
        raise HTTPException(422, f"not a {kind.__name__}: {error}") from error


def _packed(record: msgspec.Struct) -> Response:
    return Response(to_msgpack(record), media_type="application/msgpack")


def _newer(node_id: str) -> HTTPException:
    return HTTPException(409, f"a newer gateway runs as {node_id}: this one's sessions are lost")
