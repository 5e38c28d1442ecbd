"""Starts a `polar` command, and again whenever it has been killed, as an init system does; a crash stays a crash.

Each life is a real process with the command's own main. It is forked from one that has the imports behind it, which
saves a second a life.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from peers import killer
from peers.killer import Plan

_PRELOADED = [
    "polar.cli.serve",
    "polar.cli.gateway",
    "polar.server",
    "polar.gateway",
    "polar.evaluators.command",
    "polar.harnesses.shell",
    "polar.proxy.engines.sglang",
    "polar.runtimes.bubblewrap",
    "polar.trajectory.prefix_merging",
    "anyio._backends._asyncio",
    "encodings.idna",
    "pydantic.v1",
    "rich._emoji_codes",
    "uvicorn.lifespan.off",
    "uvicorn.protocols.http.auto",
    "uvicorn.protocols.websockets.auto",
    __name__,
]
"""what every life imports sooner or later"""
_one_at_a_time = threading.Lock()
"""multiprocessing asks after every child whenever one is started, and not safely from two threads"""
_forking = multiprocessing.get_context("forkserver")
_forking.set_forkserver_preload(_PRELOADED)


class Supervised:
    """`plans`: how the first lives are to end; those after them live until `stop`."""

    def __init__(self, name: str, argv: list[str], folder: Path, plans: list[Plan], env: dict[str, str]) -> None:
        self.name, self.argv, self.folder, self.env = name, argv, folder, env
        self.plans = list(plans)
        self.pids: list[int] = []
        self.crashes: list[tuple[str, int | None]] = []
        self._stopping = threading.Event()
        self._process: Any = None
        self._thread = threading.Thread(target=self._keep_alive)
        self._thread.start()

    @property
    def output(self) -> Path:
        return self.folder / f"{self.name}.txt"

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        self._stopping.set()
        with _one_at_a_time:
            if self._process is not None and self._process.is_alive():
                os.kill(self._process.pid, number)
        self._thread.join(60)
        assert not self._thread.is_alive(), f"{self.name} did not stop"

    def _keep_alive(self) -> None:
        while not self._stopping.is_set():
            plan = self.plans.pop(0) if self.plans else None
            life = (self.argv, self.env, self.output, plan, self.folder)
            with _one_at_a_time:
                self._process = _forking.Process(target=live, args=life)
                self._process.start()
                self.pids.append(self._process.pid)
                if self._stopping.is_set():
                    self._process.terminate()
            wait([self._process.sentinel])
            with _one_at_a_time:
                self._process.join()
            early = self._stopping.is_set() and self._process.exitcode == -signal.SIGTERM  # before it listens to it
            if self._process.exitcode not in (0, -signal.SIGKILL) and not early:
                self.crashes.append((self.name, self._process.exitcode))
                return


def live(argv: list[str], env: dict[str, str], output: Path, plan: Plan | None, folder: Path) -> None:
    """One life."""
    fd = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(fd, stream)
    os.environ.update(env)
    killer.arm(plan, folder)
    sys.argv = ["polar", *argv]
    from polar.cli.main import main

    main()
