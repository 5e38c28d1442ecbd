"""The process that waits with everything imported and forks one server a sandbox; it ends with its owner, and they
with it: by the kernel's word when the owner dies, by the end of a pipe when this process does.

A request is one message with the control socket's end attached: `argv` of bubblewrap, or None for no namespaces.
"""

from __future__ import annotations

import gc
import os
import selectors
import signal
import socket
import sys
from contextlib import suppress

from polar.runtimes.inside import namespaces, syscalls
from polar.runtimes.inside.framing import CHUNK, MOST_FDS, Inbox, Message, pack
from polar.runtimes.inside.processes import descendants, kill_until_gone
from polar.runtimes.inside.server import Server


def main(fd: int, parent: int) -> None:
    """`fd`: where the requests of the process `parent` come from."""
    owner = socket.socket(fileno=fd)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, lambda *_: None)  # not SIG_IGN, which commands would inherit
    syscalls.name_process("polar-sandboxes")
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    gc.collect()
    gc.freeze()
    gc.disable()
    inbox = Inbox()
    life, living = os.pipe()
    wake, waker = os.pipe()
    for end in (wake, waker):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waker, warn_on_full_buffer=False)
    selector = selectors.EpollSelector()
    selector.register(owner, selectors.EVENT_READ)
    selector.register(wake, selectors.EVENT_READ)
    while True:
        ready = [key.fd for key, _ in selector.select()]
        _reap(wake)
        if fd in ready:
            data, fds, _, _ = socket.recv_fds(owner, CHUNK, MOST_FDS)
            if not data:
                return
            for request, attached in inbox.feed(data, fds):
                _launch(request, attached[0], life, (fd, living, wake, waker, selector.fileno()))


def _reap(wake: int) -> None:
    with suppress(BlockingIOError):
        os.read(wake, CHUNK)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _launch(request: Message, control_fd: int, life: int, ours: tuple[int, ...]) -> None:
    if os.fork():
        os.close(control_fd)
        return
    control = socket.socket(fileno=control_fd)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for fd in ours:
        os.close(fd)
    try:
        server = _enter(request, control, life)
    except (OSError, namespaces.SetupError) as error:
        with suppress(OSError):
            control.sendall(pack({"event": "failed", "error": str(error)}))
        os._exit(1)
    server.serve()
    os._exit(0)


def _enter(request: Message, control: socket.socket, life: int) -> Server:
    if request["argv"] is None:
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
        born = {"event": "born", "pid": os.getpid(), "fds": 1}
        socket.send_fds(control, [pack(born)], [os.pidfd_open(os.getpid())])
        return Server(control, life, _kill_descendants)
    syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)
    try:
        holder = namespaces.start_bwrap(request["argv"], (control.fileno(), life))
    except namespaces.SetupError:
        _kill_descendants()
        raise
    namespaces.join(holder.inside)
    namespaces.fork_first_process(control, holder)
    namespaces.settle()
    return Server(control, life, namespaces.kill_namespace)


def _kill_descendants() -> None:
    """All of them: orphans come back to this process, whatever session they moved to."""

    def reap() -> None:
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass

    kill_until_gone(lambda: descendants(os.getpid()), reap)
    reap()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
