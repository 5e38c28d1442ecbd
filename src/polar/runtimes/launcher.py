"""Starts sandboxes' servers. One launcher serves all sandboxes of a gateway, at a few milliseconds each.

The process behind it ends with its owner, however the owner ends, and so does every server.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import TracebackType

from polar.errors import SandboxFault
from polar.runtimes.channel import Channel
from polar.runtimes.inside.framing import pack

# The package's own __init__ needs site-packages, which the launcher does not read: it starts ten times faster so.
_BOOT = """
import sys, types
for name in ("polar", "polar.runtimes"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["polar.runtimes"].__path__ = [sys.argv[1]]
from polar.runtimes.inside.launcher import main
main(int(sys.argv[2]))
"""


class Launcher:
    """Used as `async with`; its process starts with the first sandbox, and again should it ever be gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None

    async def __aenter__(self) -> Launcher:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def launch(self, argv: list[str] | None) -> Channel:
        """The channel to a new server: `argv` of bubblewrap, or None for no namespaces.
        Raises SandboxFault `sandbox_start` with what bubblewrap said."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                await self._request({"argv": argv, "fds": 1}, theirs)
        except OSError as error:
            ours.close()
            raise SandboxFault(f"the sandbox launcher is gone: {error}", name="sandbox_start") from error
        channel = Channel(ours)
        try:
            await channel.ready()
        except BaseException:
            await channel.ended(kill=True)
            raise
        return channel

    async def _request(self, message: dict[str, object], control: socket.socket) -> None:
        if self._process is None or self._process.poll() is not None or self._requests is None:
            self._start()
        assert self._requests is not None
        data = pack(message)
        sent = socket.send_fds(self._requests, [data], [control.fileno()])
        await asyncio.get_running_loop().sock_sendall(self._requests, data[sent:])

    def _start(self) -> None:
        if self._requests is not None:
            self._requests.close()
        self._requests, theirs = socket.socketpair()
        self._requests.setblocking(False)
        os.set_inheritable(theirs.fileno(), True)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _BOOT, str(Path(__file__).parent), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={},
                start_new_session=True,
            )

    async def close(self) -> None:
        """Ends the process; sandboxes that still run end only with their own channel."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._requests = self._process = None
