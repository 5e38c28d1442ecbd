"""What every runtime with a server does alike: commands, files and the listener, all carried out inside the sandbox.

The host never follows a path that sandboxed programs can change: files are opened inside and come as descriptors.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
import stat
from pathlib import Path
from typing import ClassVar

from polar.errors import SandboxFault, ServerFault, TaskFault
from polar.protocols import ExecResult, Listener, Place
from polar.requests import ExecInput, RuntimeSpec
from polar.runtimes import folders
from polar.runtimes.cgroups import Cgroup, Limits
from polar.runtimes.channel import Answer, Channel
from polar.runtimes.launcher import Launcher
from polar.runtimes.options import Options

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
MOST_ARGUMENT = 128 << 10
"""bytes of one argument or variable on Linux"""
MOST_READ = 64 << 20
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

    @property
    def enforced(self) -> set[str]:
        """Of memory, pids and cpu: limits of the whole sandbox. The others hold a process each, cpu not at all."""
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

    async def _launch(self, place: Place, argv: list[str] | None) -> None:
        self._folder = place.folder.absolute()
        launcher = self.launcher
        if launcher is None:
            launcher = self._own_launcher = Launcher()
        self._channel = await launcher.launch(argv)
        folders.note_server(self._folder, self._channel.pid)
        memory = self.spec.memory_mb
        limits = Limits(memory * _MEGABYTE if memory else None, self.options.pids, self.spec.cpus)
        self._cgroup = Cgroup(self._folder, limits)
        self._cgroup.add(self._channel.pid)

    def _live(self) -> Channel:
        if self._channel is None:
            raise SandboxFault("the sandbox has not been started, or has been stopped")
        return self._channel

    async def listen(self) -> Listener:
        message, fds = await self._live().ask("listen")
        return Listener(sock=socket.socket(fileno=fds[0]), url=f"http://127.0.0.1:{message['port']}")

    async def run(self, step: ExecInput, *, timeout: float, log: Path | None = None) -> ExecResult:
        request = {"command": step.command, "cwd": step.cwd or self.workdir, "env": self.env | step.env}
        _check_sizes(request["command"], self.env | step.env)
        request |= {"stdin": step.stdin_path, "limits": self._rlimits()}
        fds = [] if log is None else [os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)]
        try:
            number, answer = await self._live().send("run", *fds, **request)
        finally:
            for fd in fds:
                os.close(fd)
        timed_out = await self._wait(number, answer, timeout)
        return self._result((await answer)[0], timed_out)

    async def _wait(self, number: int, answer: asyncio.Future[Answer], timeout: float) -> bool:
        """True when time was up; then, and when the waiting is cancelled, the command has been killed."""
        try:
            await asyncio.wait([answer], timeout=timeout)
        except asyncio.CancelledError:
            await asyncio.shield(self._live().ask("kill", command=number))
            raise
        if answer.done():
            return False
        await self._live().ask("kill", command=number)
        return True

    def _result(self, message: dict[str, object], timed_out: bool) -> ExecResult:
        if message.pop("failure") == errno.ENOSPC:
            raise ServerFault("the disk is full: the command's output could not be stored", name="disk_full")
        message.pop("id")
        limit_hit = self._cgroup.hit() if self._cgroup else False
        return ExecResult(**message, timed_out=timed_out, limit_hit=limit_hit)  # type: ignore[arg-type]

    def _rlimits(self) -> dict[str, int]:
        """For each process, where no cgroup limits the whole."""
        limits = {}
        if self.spec.storage_mb:
            limits["RLIMIT_FSIZE"] = self.spec.storage_mb * _MEGABYTE
        if self.spec.memory_mb and "memory" not in self.enforced:
            limits["RLIMIT_DATA"] = self.spec.memory_mb * _MEGABYTE
        if "pids" not in self.enforced and not self.unsafe:
            limits["RLIMIT_NPROC"] = self.options.pids
        return limits

    async def upload(self, source: Path, target: str) -> None:
        if not source.exists():
            raise TaskFault(f"upload: {source} is not on this gateway's host", name="prepare")
        await self._upload(source, target)

    async def _upload(self, source: Path, target: str) -> None:
        if source.is_symlink():
            await self._live().ask("symlink", path=target, to=os.readlink(source))
        elif source.is_dir():
            await self._live().ask("mkdir", path=target)
            for entry in sorted(source.iterdir()):
                await self._upload(entry, f"{target}/{entry.name}")
        else:
            mode = stat.S_IMODE(source.stat().st_mode)
            with source.open("rb") as file, open(await self._open(target, write=True, mode=mode), "wb") as inside:
                await asyncio.to_thread(shutil.copyfileobj, file, inside)

    async def _open(self, path: str, **how: object) -> int:
        return (await self._live().ask("open", path=path, **{"write": False} | how))[1][0]

    async def write(self, target: str, data: bytes) -> None:
        with open(await self._open(target, write=True), "wb") as file:
            file.write(data)

    async def read(self, path: str) -> bytes:
        """Raises FileNotFoundError, also for what is no regular file, and OSError above 64 MiB."""
        with open(await self._open(path), "rb") as file:
            data = file.read(MOST_READ + 1)
        if len(data) > MOST_READ:
            raise OSError(errno.EFBIG, f"{path} is larger than {MOST_READ >> 20} MiB")
        return data

    async def kill_processes(self) -> None:
        await self._live().ask("kill_all")

    async def stop(self) -> None:
        if self._channel is not None:
            await self._channel.ended(kill=self.owns_processes)
        if self._own_launcher is not None:
            await self._own_launcher.close()
        await asyncio.to_thread(self._clean)
        self._channel = self._own_launcher = self._cgroup = None

    def _clean(self) -> None:
        if self._folder is None:
            return
        if not self.owns_processes:
            folders.kill_marked(self._folder)
        if self._cgroup is not None:
            self._cgroup.remove()
        folders.remove(self._folder)


def _check_sizes(command: str, env: dict[str, str]) -> None:
    longest = {"the command": command} | {f"the variable {name}": f"{name}={value}" for name, value in env.items()}
    for what, text in longest.items():
        if len(text.encode()) >= MOST_ARGUMENT:
            raise TaskFault(f"{what} is longer than 128 KiB, which Linux does not pass on: put it into a file")
