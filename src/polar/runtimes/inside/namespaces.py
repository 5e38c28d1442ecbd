"""From bubblewrap's finished view to a process that serves it: first process of its own pid namespace, without power.

bubblewrap only builds the namespaces; it is gone once they have been entered. Commands live in a pid namespace of
their own below, where the server is pid 1: they cannot kill or trace it, and when it ends, the kernel ends them all.
"""

from __future__ import annotations

import fcntl
import json
import os
import select
import signal
import socket
import subprocess
from contextlib import suppress
from typing import NamedTuple

from polar.runtimes.inside import syscalls as sys
from polar.runtimes.inside.framing import pack

USER = 1000
_COVERED = ("sys", "sysrq-trigger", "irq", "bus")
_MOST_IN_MEMORY = "size=256m"
"""of files in / and /dev, which are the machine's memory"""
_QUIET = sys.MS_NOSUID | sys.MS_NODEV | sys.MS_NOEXEC


class SetupError(Exception):
    """Carries what bubblewrap said."""


class Holder(NamedTuple):
    """A bubblewrap that has set up its namespaces and waits until `hold` is closed."""

    bwrap: subprocess.Popen[bytes]
    inside: int
    hold: int


def start_bwrap(argv: list[str], wanted: tuple[int, ...]) -> Holder:
    """Runs bubblewrap with a shell that says when the view is complete. Raises SetupError, also when the other end of
    a descriptor in `wanted` is closed first; bubblewrap may then still be alive."""
    ready_in, ready = os.pipe()
    info_in, info = os.pipe()
    waiting, hold = os.pipe()
    errors = os.memfd_create("bwrap")
    program = [argv[0], "--info-fd", str(info), *argv[1:], "/bin/sh", "-c", "echo; read _"]
    process = subprocess.Popen(program, stdin=waiting, stdout=ready, stderr=errors, pass_fds=[info], env={})
    for fd in (ready, info, waiting):
        os.close(fd)
    inside = _child_pid(info_in, wanted)
    if inside is None or not _read(ready_in, wanted):
        process.wait()
        raise SetupError(os.pread(errors, 4096, 0).decode(errors="replace").strip())
    return Holder(process, inside, hold)


def _child_pid(fd: int, wanted: tuple[int, ...]) -> int | None:
    text = b""
    while b"}" not in text:
        data = _read(fd, wanted)
        if not data:
            return None
        text += data
    return int(json.loads(text)["child-pid"])


def _read(fd: int, wanted: tuple[int, ...]) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    for other in wanted:
        poll.register(other, select.POLLRDHUP)
    if fd not in dict(poll.poll()):
        raise SetupError("nobody waits for the sandbox any more")
    return os.read(fd, 4096)


def join(pid: int) -> None:
    """Enters the namespaces of process `pid`, the user namespace that owns them first."""
    mounts = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)
    owner = fcntl.ioctl(mounts, sys.NS_GET_USERNS)
    names = [name for name in ("net", "ipc", "uts") if _foreign(pid, name)]
    others = [os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY) for name in names]
    for fd in (owner, *others, mounts):
        sys.setns(fd)
        os.close(fd)


def _foreign(pid: int, name: str) -> bool:
    return os.readlink(f"/proc/{pid}/ns/{name}") != os.readlink(f"/proc/self/ns/{name}")


def fork_first_process(control: socket.socket, holder: Holder) -> None:
    """Returns in the first process of a new pid namespace; this process tells its pid, lets bubblewrap go and ends."""
    sys.unshare(sys.CLONE_NEWPID)
    pid = os.fork()
    if pid == 0:
        os.close(holder.hold)
        return
    born = {"event": "born", "pid": pid, "fds": 1}
    socket.send_fds(control, [pack(born)], [os.pidfd_open(pid)])
    os.close(holder.hold)
    holder.bwrap.wait()
    os._exit(0)


def settle() -> None:
    """Mounts this pid namespace's /proc, takes an ordinary user id, and gives every capability up for good."""
    os.chdir("/")
    sys.mount("proc", "/proc", "proc", _QUIET)
    for name in _COVERED:
        _cover(f"/proc/{name}")
    for path in ("/", "/dev"):
        sys.mount("none", path, None, sys.MS_REMOUNT | sys.MS_NOSUID | sys.MS_NODEV, _MOST_IN_MEMORY)
    sys.unshare(sys.CLONE_NEWUSER)
    for name, line in (("setgroups", "deny"), ("uid_map", f"{USER} 0 1"), ("gid_map", f"{USER} 0 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    sys.drop_capabilities()
    sys.prctl(sys.PR_SET_NO_NEW_PRIVS, 1)
    sys.prctl(sys.PR_SET_DUMPABLE, 0)


def _cover(path: str) -> None:
    """Read-only: these files are writable to the host's root even without capabilities."""
    if os.path.exists(path):
        sys.mount(path, path, None, sys.MS_BIND | sys.MS_REC)
        sys.mount(path, path, None, sys.MS_BIND | sys.MS_REMOUNT | sys.MS_RDONLY | _QUIET)


def kill_namespace() -> None:
    """Kills every process of the namespace but this one (its first), in one step that a forking process cannot race."""
    with suppress(ProcessLookupError):
        os.kill(-1, signal.SIGKILL)
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
