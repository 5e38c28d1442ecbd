"""A data folder that no server serves is read through a server of its own, for the time of one command: whoever looks
at a finished run needs nothing running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

from polar.cli.live import server, token_of
from polar.config import RolloutSettings
from polar.errors import ConfigError


@contextmanager
def served(data: Path) -> Iterator[str | None]:
    """The URL; None where a server has the folder, or there is nothing in it."""
    if not (data / "polar.db").is_file():
        yield None
        return
    token = token_of(data)
    listening: Future[str] = Future()
    stopping: Future[None] = Future()
    thread = threading.Thread(target=lambda: asyncio.run(_serve(data, token, listening, stopping)))
    thread.start()
    try:
        fault = listening.exception()
        if isinstance(fault, OSError):
            raise ConfigError(f"a folder is read where it can be written to, for its lock: {fault}. Copy it first")
        yield None if isinstance(fault, ConfigError) else listening.result()
    finally:
        stopping.set_result(None)
        thread.join()


async def _serve(data: Path, token: str, listening: Future[str], stopping: Future[None]) -> None:
    settings = RolloutSettings(port=0, save_dir=str(data), retain_days=None, retain_gb=None)
    serving = asyncio.ensure_future(server(settings, token, listening.set_result))
    done, _ = await asyncio.wait({serving, asyncio.wrap_future(stopping)}, return_when=asyncio.FIRST_COMPLETED)
    if serving in done and (fault := serving.exception()) is not None:
        listening.set_exception(fault)
        return
    serving.cancel()
    await asyncio.wait({serving})
