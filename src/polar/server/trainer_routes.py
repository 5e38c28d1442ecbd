"""Tasks, as trainers hand them in, look after them and take them back. What is answered here has been saved."""

from __future__ import annotations

import time
from typing import Any

from fastapi import APIRouter, HTTPException, Request, Response
from fastapi.concurrency import run_in_threadpool

from polar.config import DELIVERY_HEADER, IGNORED_HEADER
from polar.records import TaskResult, TaskState, TaskStatus
from polar.replies import Accepted
from polar.requests import LONGEST_IDENTIFIER, TaskRequest
from polar.server import submission, views
from polar.server.answers import JSON, MSGPACK, gives, ref, reply, reply_with_results
from polar.server.bodies import check_type
from polar.server.core import Core, DiskFull
from polar.server.state import Task

REFUSE_SECONDS = 300.0


async def find(core: Core, task_id: str) -> Task:
    task = await core.task(task_id)
    if task is None:
        raise HTTPException(404, "Task not found")
    await core.saved(task)
    return task


def add_task_routes(router: APIRouter, core: Core) -> None:
    @router.post("/rollout/task/submit", openapi_extra=_submit_extra(), **gives(Accepted, 409, 415, 422))
    async def submit(request: Request) -> Response:
        """Hands a task in. It may be repeated: the same task under the same id is one task."""
        check_type(request.headers)
        wanted, ignored = await run_in_threadpool(submission.read, await request.body())
        submission.check(wanted, core.live_nodes())
        clock = core.machine.queue_clock(core.now())
        task = await run_in_threadpool(submission.new_task, wanted, clock, time.time())
        accepted = await _submit(core, task)
        document = Accepted(task_id=accepted.task_id, status=accepted.status)
        return reply(request, document, {IGNORED_HEADER: ignored} if ignored else None)

    @router.get("/rollout/task/{task_id}", **gives(TaskStatus, 404, 422))
    async def get_task(task_id: str, request: Request, results: bool = True) -> Response:
        """One task; without its results where they are not wanted."""
        task = await find(core, task_id)
        status = _status(core, task)
        if not results:
            return reply(request, status)
        status.result_paths = core.files.paths(task)
        return reply_with_results(request, status, core, task)

    @router.delete("/rollout/task/{task_id}", **gives(TaskStatus, 404, 422))
    async def cancel(task_id: str, request: Request, register_if_missing: bool = False) -> Response:
        """Cancels a task; with register_if_missing also one whose submit is still under way."""
        task = await core.task(task_id)
        if task is None and register_if_missing and len(task_id) <= LONGEST_IDENTIFIER:
            core.machine.refuse(task_id, core.now() + REFUSE_SECONDS)
            await core.flush()
            return reply(request, TaskStatus(task_id=task_id, status=TaskState.CANCELLED))
        if task is None:
            raise HTTPException(404, "Task not found")
        core.machine.cancel(task, core.now())
        await core.settle()
        return reply(request, _status(core, task))


def _status(core: Core, task: Task) -> TaskStatus:
    paused = core.machine.fleet.paused(core.now())
    return views.task_status(task, core.live_nodes(), full=core.full, paused=paused)


async def _submit(core: Core, task: Task) -> Task:
    """The task, or the same one that was there before. Raises HTTPException 409, DiskFull."""
    known = await core.task(task.task_id)
    if task.task_id in core.machine.refused:
        raise HTTPException(409, f"the task {task.task_id} was cancelled before it was submitted")
    if known is not None:
        if known.digest != task.digest:
            raise HTTPException(409, f"there is another task with the id {task.task_id}")
        core.machine.redirect(known, task.callback_url, core.now())
        await core.settle()
        return known
    if (why := core.no_room()) is not None:
        raise DiskFull(why)
    core.machine.submit(task)
    try:
        await core.flush()
    except BaseException:
        core.machine.forget(task)
        raise
    core.machine.admit(task)
    await core.settle()
    return task


_EXAMPLE = {
    "task_id": "hello",
    "instruction": "Say hello.",
    "num_samples": 4,
    "agent": {"harness": "shell", "custom_shell": {"command": "echo hello"}},
    "evaluator": {"strategy": "session_completed"},
}


def _submit_extra() -> dict[str, Any]:
    """What the description cannot see in the route: the body, the header of the answer, and the callback."""
    task = {"required": True, "content": {JSON: {"schema": ref(TaskRequest), "example": _EXAMPLE}}}
    result = {media: {"schema": ref(TaskResult)} for media in (JSON, MSGPACK)}
    acknowledged = {"2XX": {"description": "acknowledged; after any other answer the callback comes again"}}
    identity = {"name": DELIVERY_HEADER, "in": "header", "required": True, "schema": {"type": "string"}}
    callback = {"requestBody": {"content": result}, "parameters": [identity], "responses": acknowledged}
    ignored = {"description": "fields of the task that are not known", "schema": {"type": "string"}}
    return {
        "requestBody": task,
        "responses": {"200": {"headers": {IGNORED_HEADER: ignored}}},
        "callbacks": {"task_is_over": {"{$request.body#/callback_url}": {"post": callback}}},
    }
