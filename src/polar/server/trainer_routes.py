"""The API that trainers, clients and dashboards call. Documents are JSON, or msgpack where the caller accepts it."""

from __future__ import annotations

import sqlite3
import time
from typing import Annotated, Any, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, StreamingResponse

from polar.codec import to_json, to_msgpack
from polar.config import IGNORED_HEADER
from polar.records import TaskState, TaskStatus
from polar.requests import TaskRequest, ignored_fields
from polar.server import pauses, submission, views
from polar.server.core import Core, DiskFull
from polar.server.state import Session, Task

REFUSE_SECONDS = 300.0
MSGPACK = "application/msgpack"


def trainer_routes(core: Core) -> APIRouter:
    router = APIRouter()
    _task_routes(router, core)
    _list_routes(router, core)
    _node_routes(router, core)
    return router


def reply(request: Request, record: Any, headers: dict[str, str] | None = None) -> Response:
    if MSGPACK in request.headers.get("accept", ""):
        return Response(to_msgpack(record), headers=headers, media_type=MSGPACK)
    return Response(to_json(record), headers=headers, media_type="application/json")


async def find(core: Core, task_id: str) -> Task:
    task = await core.task(task_id)
    if task is None:
        raise HTTPException(404, "Task not found")
    await core.saved(task)
    return task


async def _find_session(core: Core, task_id: str, session_id: str) -> Session:
    session = next((row for row in (await find(core, task_id)).sessions if row.session_id == session_id), None)
    if session is None:
        raise HTTPException(404, f"the task has no session {session_id}")
    return session


def _task_routes(router: APIRouter, core: Core) -> None:
    @router.post("/rollout/task/submit")
    async def submit(task: TaskRequest, request: Request) -> Response:
        raw = await request.json()
        submission.check(task, raw, core.live_nodes())
        accepted = await _submit(core, task)
        ignored = ", ".join(ignored_fields(raw)).encode("ascii", "replace").decode()
        document = {"task_id": accepted.task_id, "status": accepted.status}
        return reply(request, document, {IGNORED_HEADER: ignored} if ignored else None)

    @router.get("/rollout/task/{task_id}")
    async def get_task(task_id: str, request: Request, results: bool = True) -> Response:
        task = await find(core, task_id)
        status = views.task_status(task, core.live_nodes(), full=core.full)
        if not results:
            return reply(request, status)
        with core.using(task_id):
            return await run_in_threadpool(_with_results, core, task, status, request)

    @router.delete("/rollout/task/{task_id}")
    async def cancel(task_id: str, request: Request, register_if_missing: bool = False) -> Response:
        task = await core.task(task_id)
        if task is None and register_if_missing:
            core.machine.refuse(task_id, core.now() + REFUSE_SECONDS)
            await core.flush()
            return reply(request, TaskStatus(task_id=task_id, status=TaskState.CANCELLED))
        if task is None:
            raise HTTPException(404, "Task not found")
        core.machine.cancel(task, core.now())
        await core.settle()
        return reply(request, views.task_status(task, core.live_nodes(), full=core.full))


async def _submit(core: Core, request: TaskRequest) -> Task:
    """The task, new or the same as before. Raises HTTPException 409, DiskFull."""
    task = await core.task(request.task_id)
    if request.task_id in core.machine.refused:
        raise HTTPException(409, f"the task {request.task_id} was cancelled before it was submitted")
    if task is not None:
        if task.digest != submission.digest(request):
            raise HTTPException(409, f"there is another task with the id {request.task_id}")
        core.machine.redirect(task, request.callback_url, core.now())
        await core.settle()
        return task
    if (why := core.no_room()) is not None:
        raise DiskFull(why)
    task = submission.new_task(request, core.machine.queue_clock(core.now()), time.time())
    core.machine.submit(task)
    try:
        await core.flush()
    except (DiskFull, sqlite3.Error):
        core.machine.forget(task)
        raise
    core.machine.admit(task)
    await core.settle()
    return task


def _with_results(core: Core, task: Task, status: TaskStatus, request: Request) -> Response:
    status.results, status.result_paths = core.files.results(task), core.files.paths(task)
    return reply(request, status)


def _list_routes(router: APIRouter, core: Core) -> None:
    @router.get("/tasks")
    async def list_tasks(
        request: Request,
        status: TaskState | None = None,
        harness: str | None = None,
        since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> Response:
        rows = await core.select(
            f"SELECT {', '.join(views.SUMMARY_COLUMNS)} FROM tasks WHERE coalesce(status = ?1, 1) "
            "AND coalesce(harness = ?2, 1) AND coalesce(updated_at >= ?3, 1) ORDER BY created_at DESC LIMIT ?4",
            (status, harness, since, limit),
        )
        return reply(request, {"tasks": views.summaries(rows)})

    @router.get("/tasks/{task_id}/sessions")
    async def list_sessions(task_id: str, request: Request) -> Response:
        task = await find(core, task_id)
        sessions = [views.session_summary(session) for session in task.sessions]
        return reply(request, {"task_id": task_id, "sessions": sessions})

    @router.get("/tasks/{task_id}/request")
    async def get_request(task_id: str, request: Request) -> Response:
        return reply(request, (await find(core, task_id)).document)

    @router.get("/tasks/{task_id}/sessions/{session_id}")
    async def get_session(task_id: str, session_id: str, request: Request) -> Response:
        session = await _find_session(core, task_id, session_id)
        if not session.status.terminal:
            raise HTTPException(409, f"the session is not over: {session.status}")
        with core.using(session.task_id):
            return await run_in_threadpool(lambda: reply(request, core.files.result(session)))

    @router.get("/tasks/{task_id}/sessions/{session_id}/log")
    async def session_log(task_id: str, session_id: str, attempt: int | None = None) -> Response:
        session = await _find_session(core, task_id, session_id)
        number = attempt or session.winner or len(session.attempts)
        path = core.files.log_path(session_id, number)
        if not path.exists():
            raise HTTPException(404, f"no sealed log of attempt {number} is here")
        return FileResponse(path, media_type="application/zstd")

    @router.get("/events")
    async def events() -> Response:
        return StreamingResponse(core.onlookers.watch(), media_type="text/event-stream")


def _node_routes(router: APIRouter, core: Core) -> None:
    @router.get("/health")
    async def health(request: Request) -> Response:
        return reply(request, {"status": "ok", "nodes": len(core.live_nodes())})

    @router.get("/rollout/status")
    async def status(request: Request) -> Response:
        tasks = dict(await core.select("SELECT task_id, status FROM tasks ORDER BY created_at"))
        pending = sum(session.queued for session in core.machine.sessions.values())
        document = {"tasks": tasks, "pipeline": {"pending_sessions": pending}, "nodes": _nodes(core)}
        return reply(request, document | {"storage": await core.retention.storage(core.full)})

    @router.get("/nodes")
    async def list_nodes(request: Request) -> Response:
        return reply(request, _nodes(core))

    @router.get("/nodes/{node_id}")
    async def get_node(node_id: str, request: Request) -> Response:
        return reply(request, _node(core, node_id))

    @router.delete("/nodes/{node_id}")
    async def drain_node(node_id: str, request: Request) -> Response:
        _node(core, node_id)
        core.machine.fleet.drain(core.machine.fleet.nodes[node_id])
        await core.settle()
        return reply(request, _node(core, node_id))

    @router.post("/rollout/inference/pause")
    async def pause(
        request: Request,
        mode: Literal["drain", "abort"] = "drain",
        timeout_seconds: Annotated[float, Query(gt=0, le=86400, allow_inf_nan=False)] = 300.0,
    ) -> Response:
        if not await pauses.pause(core, mode, timeout_seconds):
            raise HTTPException(504, f"not every gateway paused within {timeout_seconds:g} s: resumed")
        return reply(request, pauses.status(core))

    @router.post("/rollout/inference/resume")
    async def resume(request: Request) -> Response:
        await pauses.resume(core)
        return reply(request, pauses.status(core))

    @router.get("/rollout/inference/status")
    async def inference_status(request: Request) -> Response:
        return reply(request, pauses.status(core))


def _nodes(core: Core) -> dict[str, Any]:
    live = core.live_nodes()
    return {"nodes": [views.node_info(node, live) for node in core.machine.fleet.nodes.values()]}


def _node(core: Core, node_id: str) -> Any:
    node = core.machine.fleet.nodes.get(node_id)
    if node is None:
        raise HTTPException(404, f"there is no node {node_id}")
    return views.node_info(node, core.live_nodes())
