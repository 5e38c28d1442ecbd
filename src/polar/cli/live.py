"""Running server and gateway until someone says stop: an orderly stop ends sandboxes, then the gateway, then the
server, then the engine; a second Ctrl-C changes nothing about that. Nothing of ours outlives this process."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.cli.console import ExitCode, say
from polar.cli.engine_process import EngineProcess
from polar.config import NodeSettings, RolloutSettings, control_token
from polar.errors import ConfigError, EngineFault
from polar.garbage import collect_rarely

_ENGINE_LOOK_SECONDS = 0.5


Ready = Callable[[str], None]


class Stop:
    """Set by SIGINT, SIGTERM or SIGHUP; `code` is what the process then exits with."""

    def __init__(self) -> None:
        self.code = ExitCode.OK
        self._wanted = asyncio.Event()

    async def wait(self) -> None:
        await self._wanted.wait()

    def ask(self, number: signal.Signals) -> None:
        if self._wanted.is_set():
            say("still stopping: sandboxes are being cleared away")
            return
        if number is signal.SIGINT:
            self.code = ExitCode.INTERRUPTED
        say("stopping")
        self._wanted.set()


@contextmanager
def _signals(stop: Stop) -> Iterator[None]:
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    for number in numbers:
        loop.add_signal_handler(number, stop.ask, number)
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


def live(main: Callable[[Stop], Awaitable[None]]) -> ExitCode:
    """Runs `main` to its end. Raises the first fault of several as itself."""

    async def whole() -> ExitCode:
        stop = Stop()
        with _signals(stop):
            await main(stop)
        return stop.code

    try:
        return asyncio.run(whole())
    except BaseExceptionGroup as group:
        raise _first(group) from group


def _first(group: BaseExceptionGroup[BaseException]) -> BaseException:
    error = group.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error


def token_of(folder: Path) -> str:
    """The control token of a data folder, made there if need be. Raises ConfigError for an unusable folder."""
    try:
        return control_token(folder)
    except OSError as error:
        raise ConfigError(f"the data folder {folder} cannot be used: {error.strerror}. Give --data another") from error


def check_port(host: str, port: int, option: str) -> None:
    """Raises ConfigError where nothing can listen: it is told before an engine is started, or waited for."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}:{port}: {error.strerror}. Give {option} another") from error


async def server(settings: RolloutSettings, token: str, ready: Ready) -> None:
    from polar.server import serve

    await serve(settings, token=token, ready=ready)


async def gateway(node: NodeSettings, server_url: str, token: str, data: Path, beat: float, ready: Ready) -> None:
    """A machine that cannot start the node's sandboxes is named at once, not by the first session."""
    from polar.gateway import Gateway
    from polar.runtimes import unavailable

    if problem := await asyncio.to_thread(unavailable, node.default_runtime or "bubblewrap"):
        say(f"warning: no sandbox can start here: {problem}", "yellow")
    collect_rarely()
    await Gateway(node, server_url=server_url, token=token, data=data, heartbeat_seconds=beat).run(ready)


async def engine_alive(engine: EngineProcess) -> None:
    """Raises EngineFault when it has died."""
    while (death := engine.death()) is None:
        await asyncio.sleep(_ENGINE_LOOK_SECONDS)
    raise EngineFault(death)


async def until_stopped(stop: Stop, *in_order: asyncio.Task[None]) -> None:
    """Waits for the word, then ends the tasks one after the other, each wholly before the next."""
    await stop.wait()
    for task in in_order:
        task.cancel()
        await asyncio.wait({task})
