"""One task from submission to its result, whatever is lost on the way.

The submission is repeated until it is answered, the result comes by callback or by a light poll, whichever is first,
and a task whose caller is cancelled is cancelled on the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from polar.client import AsyncClient, ClientError
from polar.records import TaskResult, TaskState
from polar.requests import TaskRequest
from slime_bridge.callback import listening

log = logging.getLogger(__name__)
POLL_SECONDS = 2.0
POLLED_AT_ONCE = 64
SUBMITTED_AT_ONCE = 32
LONGEST_BACKOFF = 10.0
CANCEL_POLL_SECONDS = 0.2


def passing(error: ClientError) -> bool:
    """Whether the same call may succeed later: the server is away, or has a fault of its own."""
    return error.status is None or error.status >= 500


class Tasks:
    """`cancel_seconds`: how long a cancelled task is waited for until nothing of it runs."""

    def __init__(self, client: AsyncClient, cancel_seconds: float) -> None:
        self.callback_url: str | None = None
        self.cancel_seconds = cancel_seconds
        self._client = client
        self._waiting: dict[str, asyncio.Future[TaskResult]] = {}
        self._submitting = asyncio.Semaphore(SUBMITTED_AT_ONCE)
        self._accepted: dict[str, TaskRequest] = {}

    async def run(self, request: TaskRequest) -> TaskResult:
        """Raises ClientError where the server will never take it."""
        request = request.model_copy(update={"callback_url": self.callback_url, "callback_format": "msgpack"})
        result: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.task_id] = result
        try:
            await self._submit(request)
            return await result
        except asyncio.CancelledError:
            await self.cancel(request.task_id)
            raise
        finally:
            del self._waiting[request.task_id]
            self._accepted.pop(request.task_id, None)

    def arrived(self, result: TaskResult) -> None:
        """A callback: early, doubled, and one of an unknown task are all harmless."""
        waiting = self._waiting.get(result.task_id)
        if waiting is not None and not waiting.done():
            waiting.set_result(result)
        else:
            log.info("a callback of the task %s, which nobody waits for", result.task_id)

    async def poll_for_ever(self) -> None:
        """The safety net behind callbacks."""
        while True:
            await asyncio.sleep(POLL_SECONDS)
            for task_id in list(self._waiting)[:POLLED_AT_ONCE]:
                try:
                    await self._poll(task_id)
                except ClientError as error:
                    if not passing(error):
                        raise
                    log.warning("%s", error)
                    break

    async def cancel(self, task_id: str) -> None:
        """Returns when nothing of the task runs any more, at the latest after `cancel_seconds`."""
        deadline = time.monotonic() + self.cancel_seconds
        try:
            status = await self._client.cancel(task_id, register_if_missing=True)
            while not status.status.terminal and time.monotonic() < deadline:
                await asyncio.sleep(CANCEL_POLL_SECONDS)
                status = await self._client.task(task_id, results=False)
        except ClientError as error:
            log.warning("could not cancel the task %s: %s", task_id, error)

    async def _poll(self, task_id: str) -> None:
        if task_id in self._waiting:
            self._waiting[task_id] = self._waiting.pop(task_id)  # behind those that were not looked at
        try:
            status = await self._client.task(task_id, results=False)
        except ClientError as error:
            if error.status != 404:
                raise
            if task_id in self._accepted and task_id in self._waiting:
                log.warning("the server does not know the task %s: submitted again", task_id)
                await self._client.submit(self._accepted[task_id])
            return
        if status.status.terminal and task_id in self._waiting:
            whole = await self._client.task(task_id)
            self.arrived(TaskResult(task_id=task_id, status=whole.status, results=whole.results))
        elif status.waiting_for:
            log.warning("the task %s waits for %s", task_id, status.waiting_for)

    async def _submit(self, request: TaskRequest) -> None:
        wait = 0.5
        while True:
            try:
                async with self._submitting:
                    await self._client.submit(request)
            except ClientError as error:
                if not passing(error):
                    raise
                log.warning("the task %s is not submitted yet: %s", request.task_id, error)
            else:
                self._accepted[request.task_id] = request
                return
            await asyncio.sleep(wait)
            wait = min(2 * wait, LONGEST_BACKOFF)


@asynccontextmanager
async def running_tasks(client: AsyncClient, callback_host: str, cancel_seconds: float) -> AsyncIterator[Tasks]:
    """Tasks with their listener and their poll. Raises ConfigError where `callback_host` is not this machine's."""
    tasks = Tasks(client, cancel_seconds)
    async with listening(callback_host, tasks.arrived) as tasks.callback_url, asyncio.TaskGroup() as polling:
        poll = polling.create_task(tasks.poll_for_ever())
        try:
            yield tasks
        finally:
            poll.cancel()


async def cancel_earlier_run(client: AsyncClient, folder: str | None, run_id: str) -> None:
    """Cancels what a run that saved to the same folder left running, and leaves this run's name for the next."""
    if folder is None:
        return
    path = Path(folder) / "rollout" / "polar_run_id"
    if path.exists():
        earlier = path.read_text().strip()
        for task in (await client.tasks(status=TaskState.RUNNING, limit=1000)).tasks:
            if f"-{earlier}-" in task.task_id:
                await client.cancel(task.task_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(run_id)
