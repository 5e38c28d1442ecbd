"""Callbacks go out at once, and again until they are acknowledged with a 2xx; one slow receiver delays no other.

However many are due, and however large: a few connections a receiver, one where it fails; a bounded number in all;
and of each payload no more in memory than the one session that is being written to its file.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from tempfile import SpooledTemporaryFile
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import aiohttp
import structlog

from polar.config import DELIVERY_HEADER
from polar.records import TaskResult
from polar.server.answers import JSON, MSGPACK, with_results
from polar.server.files import Files
from polar.server.state import Delivery, DeliveryState, Task

if TYPE_CHECKING:
    from polar.server.core import Core

log = structlog.get_logger("polar.server")
AT_ONCE, IN_ALL = 8, 128
"""callbacks under way to one receiver, and to all"""
_IN_MEMORY, _CHUNK, _SLOWEST = 256 << 10, 256 << 10, 1 << 20
"""bytes: a payload above the first is a file; it is read in chunks; a receiver that takes fewer a second hangs"""
_OWN_FAULTS = (ValueError, TypeError, RuntimeError)
"""a host that no name system takes, a result that cannot be written: one callback fails, and not the server"""


class _Lane:
    """One receiver's callbacks. While it fails, one at a time finds out when it is back; the log is told when that
    begins and when it ends. `receiver` is host and port: the rest of a URL may be secret."""

    def __init__(self, receiver: str) -> None:
        self.receiver = receiver
        self.waiting: deque[Delivery] = deque()
        self.carriers = 0
        self.well = True

    def note(self, why_not: str | None) -> None:
        if self.well and why_not is not None:
            log.warning("callbacks are not acknowledged", receiver=self.receiver, why=why_not)
        elif not self.well and why_not is None:
            log.info("callbacks are acknowledged again", receiver=self.receiver)
        self.well = why_not is None

    @property
    def short_of_carriers(self) -> bool:
        return self.carriers < min(AT_ONCE if self.well else 1, self.carriers + len(self.waiting))


class Courier:
    def __init__(self, answer_seconds: float) -> None:
        """`answer_seconds`: how long a receiver may take, beside the time for a large payload's way."""
        self._answer_seconds = answer_seconds
        self._out: asyncio.Queue[Delivery] = asyncio.Queue()
        self._lanes: dict[str, _Lane] = {}
        self._in_all = asyncio.Semaphore(IN_ALL)

    def send(self, delivery: Delivery) -> None:
        self._out.put_nowait(delivery)

    async def run(self, core: Core) -> None:
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector, trust_env=False) as http, asyncio.TaskGroup() as group:
            while True:
                delivery = await self._out.get()
                receiver = urlsplit(delivery.url).netloc
                lane = self._lanes.setdefault(receiver, _Lane(receiver))
                lane.waiting.append(delivery)
                self._staff(lane, core, http, group)

    def _staff(self, lane: _Lane, core: Core, http: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        while lane.short_of_carriers:
            lane.carriers += 1
            group.create_task(self._carry(lane, core, http, group))

    async def _carry(self, lane: _Lane, core: Core, http: aiohttp.ClientSession, group: asyncio.TaskGroup) -> None:
        while lane.waiting and (lane.well or lane.carriers == 1):
            delivery = lane.waiting.popleft()
            if delivery.state is not DeliveryState.PENDING:
                continue  # another URL has taken its place, and its task may have gone
            async with self._in_all:
                lane.note(await self._deliver(delivery, core, http))
            self._staff(lane, core, http, group)
        lane.carriers -= 1
        if lane.well and not lane.waiting and not lane.carriers:
            del self._lanes[lane.receiver]

    async def _deliver(self, delivery: Delivery, core: Core, http: aiohttp.ClientSession) -> str | None:
        """None when the receiver has acknowledged, else why not."""
        task = await core.task(delivery.task_id)
        assert task is not None, f"a delivery of the unknown task {delivery.task_id}"
        why = await self._post(delivery, task, core.files, http)
        if why is None:
            core.machine.owed.delivered(delivery)
        else:
            core.machine.owed.not_delivered(delivery, why, core.now())
        return why

    async def _post(self, delivery: Delivery, task: Task, files: Files, http: aiohttp.ClientSession) -> str | None:
        packed = task.callback_format == "msgpack"
        headers = {DELIVERY_HEADER: delivery.delivery_id, "Content-Type": MSGPACK if packed else JSON}
        seconds = self._answer_seconds
        try:
            with SpooledTemporaryFile(_IN_MEMORY, dir=str(files.folder)) as body:
                size = await asyncio.to_thread(_write, body, task, files, packed)
                seconds += size / _SLOWEST
                timeout = aiohttp.ClientTimeout(total=seconds)
                headers["Content-Length"] = str(size)
                async with http.post(
                    delivery.url, data=_chunks(body), headers=headers, timeout=timeout, allow_redirects=False
                ) as answer:
                    return None if 200 <= answer.status < 300 else f"the receiver answered {answer.status}"
        except TimeoutError:
            return f"no answer within {seconds:.3g} s"
        except aiohttp.ServerDisconnectedError:  # its text is that of the half answer as aiohttp has it
            return "the connection ended before the answer was whole"
        except (aiohttp.ClientError, OSError, *_OWN_FAULTS) as error:
            return str(error) or type(error).__name__


def _write(body: SpooledTemporaryFile[bytes], task: Task, files: Files, packed: bool) -> int:
    """The TaskResult's size, which receivers ask for; it is never whole in memory."""
    record = TaskResult(task_id=task.task_id, status=task.status, result_paths=files.paths(task))
    for piece in with_results(record, files, task, packed=packed):
        body.write(piece)
    size = body.tell()
    body.seek(0)
    return size


async def _chunks(body: SpooledTemporaryFile[bytes]) -> AsyncIterator[bytes]:
    while chunk := await asyncio.to_thread(body.read, _CHUNK):
        yield chunk
