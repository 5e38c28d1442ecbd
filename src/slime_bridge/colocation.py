"""Engines that share their GPUs with the trainer sleep while it trains: then no model call is in flight at any gateway.

Inference is paused before the trainer gets the rollout, and resumed when it asks for the next one. The pause is renewed
for as long as the trainer lives, and ends by itself once it has died, so that nobody waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from polar.client import AsyncClient, ClientError
from polar.errors import ConfigError

log = logging.getLogger(__name__)
AGAIN_SECONDS = 0.5


class Engines:
    """`seconds`: how long it may take until they are idle, and how long a pause lasts that nobody renews."""

    def __init__(
        self, client: AsyncClient, seconds: float, background: asyncio.TaskGroup, *, colocated: bool = True
    ) -> None:
        self._client, self._seconds, self._colocated = client, seconds, colocated
        self._renewals = background.create_task(self._renew())
        self._one = asyncio.Lock()
        self._asleep = False

    @asynccontextmanager
    async def awake(self) -> AsyncIterator[None]:
        """Within, they are used. Raises ConfigError on leaving where calls are still in flight after `seconds`."""
        if not self._colocated:
            yield
            return
        async with self._one:
            self._asleep = False
            await _insist(self._client.resume, self._seconds)
        yield
        async with self._one:
            try:
                await _insist(self._pause, self._seconds)
            except ClientError as error:
                raise ConfigError(
                    f"polar_weight_update_pause_timeout: the engines are not idle after {self._seconds:g} s ({error}); "
                    "set it higher, or see `polar status` for the gateway that does not answer"
                ) from error
            self._asleep = True

    def close(self) -> None:
        self._renewals.cancel()

    async def _pause(self) -> object:
        return await self._client.pause("abort", timeout_seconds=self._seconds)

    async def _renew(self) -> None:
        while True:
            await asyncio.sleep(self._seconds / 3)
            async with self._one:
                if self._asleep:
                    try:
                        await self._pause()
                    except ClientError as error:
                        log.warning("the pause of inference could not be renewed: %s", error)


async def _insist(call: Callable[[], Awaitable[object]], seconds: float) -> None:
    """Again while the server is away, e.g. because it is started anew."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            await call()
            return
        except ClientError as error:
            if error.status is not None or time.monotonic() > deadline:
                raise
        await asyncio.sleep(AGAIN_SECONDS)
