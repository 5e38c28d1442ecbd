"""What the built-in runtimes do alike, through the server that runs in their sandbox: commands, files, the listener."""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

from polar.errors import SandboxFault, ServerFault
from polar.protocols import ExecResult, Listener, Place
from polar.requests import ExecInput, RuntimeSpec
from polar.runtimes import files, folders
from polar.runtimes.cgroups import Cgroup, Limits
from polar.runtimes.channel import Answer, Channel
from polar.runtimes.host import check_sizes, disk, opened, to_its_end
from polar.runtimes.launcher import Launcher
from polar.runtimes.options import Options

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_MEGABYTE = 1 << 20


class Served:
    """`launcher`: shared with other sandboxes; without one the sandbox starts its own, 40 ms dearer."""

    unsafe: ClassVar[bool] = False
    """True: the sandbox keeps programs from nothing"""
    owns_processes: ClassVar[bool] = True
    """the server's death takes all processes along"""
    session_dir: str
    workdir: str
    env: dict[str, str]

    def __init__(self, spec: RuntimeSpec) -> None:
        self.spec = spec
        self.options = Options.of(spec)
        self.launcher: Launcher | None = None
        self._own_launcher: Launcher | None = None
        self._channel: Channel | None = None
        self._cgroup: Cgroup | None = None
        self._folder: Path | None = None

    def _make(self, folder: Path) -> list[str] | None:
        """Readies the sandbox's folder; bubblewrap's command line, or None where there are to be no namespaces."""
        raise NotImplementedError

    @property
    def enforced(self) -> set[str]:
        """Of memory, pids and cpu: limits of the whole sandbox. Elsewhere memory and pids bind each process or user,
        and cpu nothing."""
        return self._cgroup.controllers if self._cgroup else set()

    def _environment(self) -> dict[str, str]:
        session = self.session_dir
        return {
            "PATH": PATH,
            "HOME": session,
            "LANG": "C.UTF-8",
            "SESSION_DIR": session,
            "ARTIFACTS_DIR": f"{session}/artifacts",
            "LOGS_DIR": f"{session}/logs",
            "AGENT_LOG_DIR": f"{session}/logs/agent",
        } | self.spec.env

    async def start(self, place: Place) -> None:
        folder = self._folder = place.folder.absolute()
        launcher = self.launcher
        if launcher is None:
            launcher = self._own_launcher = Launcher()
        try:
            with disk():
                argv = await to_its_end(self._make, folder)
                self._channel = await launcher.launch(argv)
                await to_its_end(self._place, folder, self._channel.pid)
        except OSError as error:
            raise SandboxFault(f"the sandbox did not start: {error}", name="sandbox_start") from error

    def _place(self, folder: Path, pid: int) -> None:
        folders.note_server(folder, pid)
        memory = self.spec.memory_mb
        limits = Limits(memory * _MEGABYTE if memory else None, self.options.pids, self.spec.cpus)
        self._cgroup = Cgroup(folder, limits)
        self._cgroup.add(pid)

    def _live(self) -> Channel:
        if self._channel is None:
            raise SandboxFault("the sandbox has not been started, or has been stopped")
        return self._channel

    async def listen(self) -> Listener:
        """A listener inside; whoever asked closes it."""
        message, fds = await self._live().ask("listen")
        return Listener(sock=socket.socket(fileno=fds[0]), url=f"http://127.0.0.1:{message['port']}")

    async def run(self, step: ExecInput, *, timeout: float, log: Path | None = None) -> ExecResult:
        """`output` and `errors` are the last 1 MiB of each. A command that cannot start has exit code 126."""
        env = self.env | step.env
        check_sizes(step.command, env)
        request: dict[str, Any] = {"command": step.command, "cwd": self._inside(step.cwd or ""), "env": env}
        stdin = self._inside(step.stdin_path) if step.stdin_path else None
        request |= {"stdin": stdin, "limits": self._rlimits()}
        with disk(), opened(log) as fds:
            number, answer = await self._live().send("run", *fds, **request)
        timed_out = await self._wait(number, answer, timeout)
        return self._result((await answer)[0], timed_out)

    async def _wait(self, number: int, answer: asyncio.Future[Answer], timeout: float) -> bool:
        """True when time was up; then, and when the waiting is cancelled, the command has been killed."""
        try:
            await asyncio.wait([answer], timeout=timeout)
        except asyncio.CancelledError:
            with suppress(SandboxFault):
                await self._live().ask("kill", command=number)
            raise
        if answer.done():
            return False
        await self._live().ask("kill", command=number)
        return True

    def _result(self, message: dict[str, Any], timed_out: bool) -> ExecResult:
        if message["failure"] == errno.ENOSPC:
            raise ServerFault("the disk is full: the command's output could not be stored", name="disk_full")
        hit = self._cgroup is not None and self._cgroup.hit()
        code = message["exit_code"]
        return ExecResult(
            exit_code=code,
            output=message["output"],
            errors=message["errors"],
            timed_out=timed_out,
            limit_hit=hit and code != 0,
        )

    def _rlimits(self) -> dict[str, int]:
        """For each process, where no cgroup limits the whole."""
        limits = {"RLIMIT_CORE": 0}
        if self.spec.storage_mb:
            limits["RLIMIT_FSIZE"] = self.spec.storage_mb * _MEGABYTE
        if self.spec.memory_mb and "memory" not in self.enforced:
            limits["RLIMIT_DATA"] = self.spec.memory_mb * _MEGABYTE
        if "pids" not in self.enforced and not self.unsafe:
            limits["RLIMIT_NPROC"] = self.options.pids
        return limits

    async def upload(self, source: Path, target: str) -> None:
        with disk():
            await files.upload(self._live(), source, self._inside(target))

    async def write(self, target: str, data: bytes) -> None:
        with disk():
            await files.write(self._live(), self._inside(target), data)

    async def read(self, path: str) -> bytes:
        """Raises FileNotFoundError, also for what is no regular file, and OSError above 64 MiB."""
        return await files.read(self._live(), self._inside(path))

    def _inside(self, path: str) -> str:
        """A relative path starts at the working directory."""
        return os.path.join(self.workdir, path) if path else self.workdir

    async def kill_processes(self) -> None:
        await self._live().ask("kill_all")

    async def stop(self) -> None:
        if self._channel is not None:
            await self._channel.ended(kill=self.owns_processes)
        if self._own_launcher is not None:
            await self._own_launcher.close()
        await to_its_end(self._clean)
        self._channel = self._own_launcher = self._cgroup = None

    def _clean(self) -> None:
        if self._folder is None:
            return
        if not self.owns_processes:
            folders.kill_marked(self._folder)
        if self._cgroup is not None:
            self._cgroup.remove()
        folders.remove(self._folder)
