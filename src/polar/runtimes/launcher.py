"""Starts sandboxes' servers. One launcher serves all sandboxes of a gateway, at a few milliseconds each.

The process behind it ends with its owner, however the owner ends, and every sandbox with it.
"""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from pathlib import Path

from polar.errors import SandboxFault
from polar.runtimes.channel import Channel, post

# The package's own __init__ needs site-packages; without them the process starts five times faster.
_BOOT = """
import sys, types
for name in ("polar", "polar.runtimes"):
    sys.modules[name] = types.ModuleType(name)
sys.modules["polar.runtimes"].__path__ = [sys.argv[1]]
from polar.runtimes.inside.launcher import main
main(int(sys.argv[2]), int(sys.argv[3]))
"""


class Launcher:
    """Used as `async with`; its process starts with the first sandbox, and again should it ever be gone."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._requests: socket.socket | None = None
        self._sending = asyncio.Lock()

    async def __aenter__(self) -> Launcher:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def launch(self, argv: list[str] | None) -> Channel:
        """The channel to a new server: `argv` of bubblewrap, or None for no namespaces.
        Raises SandboxFault `sandbox_start` with what bubblewrap said."""
        ours, theirs = socket.socketpair()
        channel = Channel(ours)
        try:
            with theirs:
                await self._request(argv, theirs)
            await channel.ready()
        except OSError as error:
            channel.close()
            raise SandboxFault(f"the sandbox launcher cannot be reached: {error}", name="sandbox_start") from error
        except BaseException:  # a cancellation too must not leave the sandbox behind
            await channel.ended(kill=True)
            raise
        return channel

    async def _request(self, argv: list[str] | None, control: socket.socket) -> None:
        async with self._sending:
            if self._process is None or self._process.poll() is not None:
                self._requests = self._start()
            assert self._requests is not None, "started with the process"
            await post(self._requests, {"argv": argv}, (control.fileno(),))

    def _start(self) -> socket.socket:
        if self._requests is not None:
            self._requests.close()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            self._process = subprocess.Popen(
                [
                    sys.executable,
                    "-I",
                    "-S",
                    "-c",
                    _BOOT,
                    str(Path(__file__).parent),
                    str(theirs.fileno()),
                    str(os.getpid()),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env={},
                cwd="/",
                start_new_session=True,
            )
        return ours

    async def close(self) -> None:
        """Ends the process and every sandbox that it started."""
        if self._requests is not None:
            self._requests.close()
        if self._process is not None:
            await asyncio.to_thread(self._process.wait)
        self._requests = self._process = None
