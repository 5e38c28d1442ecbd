"""One task from submission to its result, whatever is lost on the way.

The submission is repeated until it is answered, the result comes by callback or by a light poll, whichever is first,
and a task whose caller is cancelled is cancelled on the server.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from polar.client import AsyncClient, Client, ClientError
from polar.records import TaskResult, TaskState, TaskStatus
from polar.requests import TaskRequest
from slime_bridge.callback import listening

log = logging.getLogger(__name__)
POLL_SECONDS = 2.0
POLLED_AT_ONCE = 64
SUBMITTED_AT_ONCE = 32
LONGEST_BACKOFF = 10.0
CANCEL_POLL_SECONDS = 0.2
TELL_SECONDS = 60.0
"""between two messages about what tasks wait for"""
MOST_TASKS_LISTED = 1000


def passing(error: ClientError) -> bool:
    """Whether the same call may succeed later: the server is away, busy, or has a fault of its own."""
    return error.status is None or error.status >= 500 or error.status in (408, 429)


class Tasks:
    """`cancel_seconds`: how long a cancelled task is waited for until nothing of it runs."""

    def __init__(self, client: AsyncClient, cancel_seconds: float) -> None:
        self.callback_url: str | None = None
        self.cancel_seconds = cancel_seconds
        self.left: list[str] | None = None
        self._client = client
        self._waiting: dict[str, asyncio.Future[TaskResult]] = {}
        self._submitting = asyncio.Semaphore(SUBMITTED_AT_ONCE)
        self._accepted: dict[str, TaskRequest] = {}
        self._told_at = -TELL_SECONDS

    def leave(self) -> None:
        """From now on nothing is cancelled here: what the server may be working on is `left` to `cancel_at_once`."""
        if self.left is None:
            self.left = list(self._waiting)

    async def run(self, request: TaskRequest) -> TaskResult:
        """Raises ClientError where the server will never take it."""
        request = request.model_copy(update={"callback_url": self.callback_url, "callback_format": "msgpack"})
        result: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        self._waiting[request.task_id] = result
        try:
            await self._submit(request, result)
            return await result
        except asyncio.CancelledError:
            if self.left is None:
                await self.cancel(request.task_id)
            raise
        finally:
            del self._waiting[request.task_id]
            self._accepted.pop(request.task_id, None)

    async def probe(self, task: dict[str, Any], seconds: float) -> bool:
        """Whether the server told by callback, in time, that this task, cancelled at once, is over."""
        task_id = task["task_id"]
        heard: asyncio.Future[TaskResult] = asyncio.get_running_loop().create_future()
        self._waiting[task_id] = heard
        try:
            await self._client.submit(task | {"callback_url": self.callback_url})
            await self._client.cancel(task_id)
            async with asyncio.timeout(seconds):
                await heard
        except TimeoutError:
            return False
        finally:
            del self._waiting[task_id]
        return True

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
            for task_id in [each for each in self._waiting if each in self._accepted][:POLLED_AT_ONCE]:
                try:
                    await self._poll(task_id)
                except ClientError as error:
                    if passing(error):
                        log.warning("%s", error)
                        break
                    self._refused(task_id, error)

    async def cancel(self, task_id: str) -> None:
        """Returns when nothing of the task runs any more, at the latest after `cancel_seconds`."""
        deadline, asked = time.monotonic() + self.cancel_seconds, False
        while True:
            try:
                status = await (self._look(task_id) if asked else self._cancel(task_id))
                asked = True
                if status.status.terminal:
                    return
            except ClientError as error:
                if not passing(error) or time.monotonic() > deadline:
                    log.warning("could not cancel the task %s: %s", task_id, error)
                    return
            if time.monotonic() > deadline:
                log.warning("the task %s, cancelled %g s ago, still runs", task_id, self.cancel_seconds)
                return
            await asyncio.sleep(CANCEL_POLL_SECONDS)

    def _cancel(self, task_id: str) -> Awaitable[TaskStatus]:
        return self._client.cancel(task_id, register_if_missing=True)

    def _look(self, task_id: str) -> Awaitable[TaskStatus]:
        return self._client.task(task_id, results=False)

    async def _poll(self, task_id: str) -> None:
        if task_id not in self._waiting:
            return
        self._waiting[task_id] = self._waiting.pop(task_id)  # behind those that were not looked at
        try:
            status = await self._look(task_id)
            whole = await self._client.task(task_id) if status.status.terminal and task_id in self._waiting else None
        except ClientError as error:
            if error.status != 404:
                raise
            if task_id in self._accepted and not self._waiting[task_id].done():
                log.warning("the server does not know the task %s: submitted again", task_id)
                await self._client.submit(self._accepted[task_id])
            return
        if whole is not None:
            if task_id in self._waiting and not self._waiting[task_id].done():
                self.arrived(TaskResult(task_id=task_id, status=whole.status, results=whole.results))
        elif status.waiting_for is not None and time.monotonic() - self._told_at > TELL_SECONDS:
            self._told_at = time.monotonic()
            log.warning("the task %s waits for %s", task_id, status.waiting_for)

    def _refused(self, task_id: str, error: ClientError) -> None:
        waiting = self._waiting.get(task_id)
        if waiting is not None and not waiting.done():
            waiting.set_exception(error)

    async def _submit(self, request: TaskRequest, result: asyncio.Future[TaskResult]) -> None:
        """Returns when the server has it; or its result, where the answers to all submissions were lost."""
        wait = 0.5
        while not result.done():
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


def cancel_at_once(url: str, task_ids: Iterable[str], seconds: float) -> None:
    """Blocks; needs no event loop and no thread, which an interpreter that ends no longer gives."""
    with Client(url, timeout=seconds) as client:
        for task_id in task_ids:
            try:
                client.cancel(task_id, register_if_missing=True)
            except ClientError as error:
                log.warning("could not cancel the task %s: %s", task_id, error)
                if error.status is None:
                    return


async def cancel_earlier_run(client: AsyncClient, folder: str | None, run_id: str) -> None:
    """Cancels what a run that saved to the same folder left running, and leaves this run's name for the next."""
    if folder is None:
        return
    path = Path(folder) / "rollout" / "polar_run_id"
    earlier = path.read_text().strip() if path.exists() else ""
    if earlier:
        for task in (await client.tasks(status=TaskState.RUNNING, limit=MOST_TASKS_LISTED)).tasks:
            if f"-{earlier}-" in task.task_id:
                await client.cancel(task.task_id)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(run_id)
    partial.replace(path)
