"""Callbacks go out at once, and again until they are acknowledged with a 2xx; one slow receiver delays no other."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import structlog

from polar.codec import to_json, to_msgpack
from polar.config import DELIVERY_HEADER
from polar.records import TaskResult
from polar.server.files import Files
from polar.server.state import Delivery, Task

if TYPE_CHECKING:
    from polar.server.core import Core

log = structlog.get_logger("polar.server")
ANSWER_SECONDS = 30.0
_AT_ONCE = 8
"""callbacks under way to one receiver"""


class Courier:
    def __init__(self) -> None:
        self._out: asyncio.Queue[Delivery] = asyncio.Queue()
        self._turns: dict[str, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(_AT_ONCE))

    def send(self, delivery: Delivery) -> None:
        self._out.put_nowait(delivery)

    async def run(self, core: Core) -> None:
        async with aiohttp.ClientSession(trust_env=False) as http, asyncio.TaskGroup() as group:
            while True:
                group.create_task(self._deliver(await self._out.get(), core, http))

    async def _deliver(self, delivery: Delivery, core: Core, http: aiohttp.ClientSession) -> None:
        async with self._turns[urlsplit(delivery.url).netloc]:
            task = await core.task(delivery.task_id)
            assert task is not None, f"a delivery of the unknown task {delivery.task_id}"
            why = await _post(delivery, task, core.files, http)
        if why is None:
            core.machine.owed.delivered(delivery)
        else:
            log.warning("callback not delivered", task_id=task.task_id, url=delivery.url, why=why)
            core.machine.owed.not_delivered(delivery, why, core.now())


async def _post(delivery: Delivery, task: Task, files: Files, http: aiohttp.ClientSession) -> str | None:
    """None when the receiver has acknowledged, else why not."""
    packed = task.callback_format == "msgpack"
    headers = {
        DELIVERY_HEADER: delivery.delivery_id,
        "Content-Type": "application/msgpack" if packed else "application/json",
    }
    body = await asyncio.to_thread(payload, task, files, packed)
    timeout = aiohttp.ClientTimeout(total=ANSWER_SECONDS)
    try:
        async with http.post(
            delivery.url, data=body, headers=headers, timeout=timeout, allow_redirects=False
        ) as answer:
            return None if 200 <= answer.status < 300 else f"the receiver answered {answer.status}"
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        return str(error) or f"no answer within {ANSWER_SECONDS:g} s"


def payload(task: Task, files: Files, packed: bool) -> bytes:
    result = TaskResult(
        task_id=task.task_id, status=task.status, results=files.results(task), result_paths=files.paths(task)
    )
    return to_msgpack(result) if packed else to_json(result)
