"""Engines that share their GPUs with the trainer sleep while it trains: then no model call is in flight at any gateway.

Inference is paused before the trainer gets the rollout, and resumed when it asks for the next one. The pause ends by
itself after `seconds`, so that nobody waits for a trainer that has died; of the bridge's own tasks none runs by then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial

from polar.client import AsyncClient, ClientError
from polar.errors import ConfigError

AGAIN_SECONDS = 0.5


@asynccontextmanager
async def awake(client: AsyncClient, seconds: float, *, colocated: bool) -> AsyncIterator[None]:
    """Within, the engines are used. Raises ConfigError on leaving where calls are still in flight after `seconds`."""
    if not colocated:
        yield
        return
    await _insist(client.resume, seconds)
    yield
    try:
        await _insist(partial(client.pause, "abort", timeout_seconds=seconds), seconds)
    except ClientError as error:
        raise ConfigError(
            f"polar_weight_update_pause_timeout: the engines are not idle after {seconds:g} s ({error}); set it "
            "higher, or see `polar nodes` for the gateway that does not answer"
        ) from error


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
