"""Looking at tasks, sessions and what happens, without a result being read."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, HTTPException, Query, Request, Response
from fastapi.concurrency import run_in_threadpool
from fastapi.responses import FileResponse, StreamingResponse

from polar.records import SessionResult, SessionSummary, TaskState
from polar.replies import Sessions, Tasks
from polar.requests import TaskRequest
from polar.server import views
from polar.server.answers import gives, problems_of, reply
from polar.server.core import Core
from polar.server.state import Session
from polar.server.trainer_routes import find

EVENTS, ZSTD = "text/event-stream", "application/zstd"


def add_list_routes(router: APIRouter, core: Core) -> None:
    @router.get("/tasks", **gives(Tasks, 422))
    async def list_tasks(
        request: Request,
        status: TaskState | None = None,
        harness: str | None = None,
        since: Annotated[float | None, Query(allow_inf_nan=False)] = None,
        limit: Annotated[int, Query(ge=1, le=1000)] = 200,
    ) -> Response:
        """The newest first; `since`: changed at this time of the epoch, in seconds, or later."""
        rows = await core.select(
            f"SELECT {', '.join(views.SUMMARY_COLUMNS)} FROM tasks WHERE coalesce(status = ?1, 1) "
            "AND coalesce(harness = ?2, 1) AND coalesce(updated_at >= ?3, 1) ORDER BY created_at DESC LIMIT ?4",
            (status, harness, since, limit),
        )
        return reply(request, Tasks(tasks=views.summaries(rows)))

    @router.get("/tasks/{task_id}/sessions", **gives(Sessions, 404, 422))
    async def list_sessions(task_id: str, request: Request) -> Response:
        """A line a session."""
        task = await find(core, task_id)
        return reply(request, Sessions(task_id=task_id, sessions=list(map(views.session_summary, task.sessions))))

    @router.get("/tasks/{task_id}/request", **gives(TaskRequest, 404, 422))
    async def get_request(task_id: str, request: Request) -> Response:
        """The task as it was submitted."""
        return reply(request, (await find(core, task_id)).document)

    @router.get("/sessions/{session_id}", **gives(SessionSummary, 404, 422))
    async def find_session(session_id: str, request: Request) -> Response:
        """One session, whose task need not be known."""
        task = await core.task_of(session_id)
        if task is None:
            raise HTTPException(404, f"there is no session {session_id}")
        await core.saved(task)
        return reply(request, views.session_summary(core.machine.sessions[session_id]))

    @router.get("/tasks/{task_id}/sessions/{session_id}", **gives(SessionResult, 404, 409, 422))
    async def get_session(task_id: str, session_id: str, request: Request) -> Response:
        """One session's result, once it is over."""
        session = await _session(core, task_id, session_id)
        if not session.status.terminal:
            raise HTTPException(409, f"the session is not over: {session.status}")
        task = core.machine.tasks[task_id]
        with core.using(task_id):
            return await run_in_threadpool(lambda: reply(request, core.files.result(session, task)))

    @router.get("/tasks/{task_id}/sessions/{session_id}/log", **_bytes(ZSTD, 404, 422))
    async def session_log(
        task_id: str, session_id: str, attempt: Annotated[int | None, Query(ge=1)] = None
    ) -> Response:
        """The sealed log of the accepted attempt, or of this one."""
        session = await _session(core, task_id, session_id)
        number = attempt or session.winner or len(session.attempts)
        if session.attempt(number) is None or not (path := core.files.log_path(session_id, number)).exists():
            raise HTTPException(404, f"no sealed log of attempt {number} is here")
        return FileResponse(path, media_type=ZSTD)

    @router.get("/events", **_bytes(EVENTS))
    async def events() -> Response:
        """Server-sent events, as things happen; each has `{type, ts, data}`."""
        return StreamingResponse(core.onlookers.watch(), media_type=EVENTS)


async def _session(core: Core, task_id: str, session_id: str) -> Session:
    session = next((row for row in (await find(core, task_id)).sessions if row.session_id == session_id), None)
    if session is None:
        raise HTTPException(404, f"the task has no session {session_id}")
    return session


def _bytes(media: str, *problems: int) -> dict[str, Any]:
    content = {media: {"schema": {"type": "string"}}}
    return {"response_class": Response, "responses": {200: {"content": content}, **problems_of(*problems)}}
