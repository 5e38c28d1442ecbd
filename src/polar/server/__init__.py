"""The rollout server: trainers submit tasks, gateways take sessions, and nothing that was accepted is lost."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from polar.config import RolloutSettings
from polar.errors import ConfigError
from polar.server.app import create_app
from polar.server.core import Core

__all__ = ["Core", "create_app", "serve"]
_GRACE_SECONDS = 3


class _Server(uvicorn.Server):
    """Leaves the process's signals alone, and says when it listens."""

    def __init__(self, config: uvicorn.Config, started: Callable[[], None]) -> None:
        super().__init__(config)
        self._started = started

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._started()


async def serve(settings: RolloutSettings, *, token: str, ready: Callable[[str], None] | None = None) -> None:
    """Serves until cancelled; what is under way is saved, and goes on at the next start. Port 0 = any free one;
    `ready` is told the URL. Raises ConfigError where port or data folder cannot be used."""
    listener = _listen(settings.host, settings.port)
    url = settings.public_url or f"http://{_bracketed(settings.host)}:{listener.getsockname()[1]}"
    with listener:
        core = Core(settings, token)
        config = uvicorn.Config(
            create_app(core),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=_GRACE_SECONDS,
        )
        server = _Server(config, lambda: ready(url) if ready is not None else None)
        async with core.running():
            serving = asyncio.ensure_future(server.serve(sockets=[listener]))
            try:
                await asyncio.shield(serving)
            finally:
                core.close()
                server.should_exit = True
                await serving


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        raise ConfigError(f"cannot listen on rollout.host {host}, rollout.port {port}: {error.strerror}") from error
    return listener


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
