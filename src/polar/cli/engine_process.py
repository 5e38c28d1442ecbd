"""The embedded engine as a child process: it ends with us, also when we are killed, and its output is kept."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from polar.errors import ConfigError

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 10.0
_TAIL_BYTES = 2000
HOW_TO_MAKE_A_MODEL = (
    "make one with `python -m polar_demo.warm_start DIR` (about a minute), or take the policy folder that `polar demo` "
    "leaves; or give an engine of your own with --engine-url"
)


class EngineProcess:
    """`python -m polar.embedded` on a free port of loopback. Start it before there are threads."""

    def __init__(self, model: Path, log: Path) -> None:
        """Raises ConfigError when the folder is no model, or torch is missing; starts nothing."""
        _check(model)
        self.model = model
        self.log = log
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"

    @contextmanager
    def running(self) -> Iterator[None]:
        command = [sys.executable, "-m", "polar.embedded", "--model", str(self.model), "--port", str(self.port)]
        with self.log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches us alone, and we end it last
                preexec_fn=_die_with_parent(),
            )
        try:
            yield
        finally:
            self._stop()

    def death(self) -> str | None:
        """What to say when it is no longer alive; None while it is."""
        code = self._process.poll()
        if code is None:
            return None
        return f"the embedded engine ended with exit code {code}. The end of {self.log}:\n{self._tail()}"

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _tail(self) -> str:
        return self.log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").strip()


def _check(model: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        raise ConfigError("the embedded engine needs torch: pip install 'polar-rl[demo]'")
    if not model.is_dir():
        raise ConfigError(f"--model {model} is not a folder: {HOW_TO_MAKE_A_MODEL}")


def _die_with_parent() -> Callable[[], None]:
    """The library is loaded before the fork: between fork and exec only the call itself happens."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getpid()

    def set_signal() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return set_signal


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
