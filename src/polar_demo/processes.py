"""`polar serve` with the embedded engine, as a child process that ends with us, and the engine's weight updates."""

from __future__ import annotations

import _thread
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

_UPDATE_SECONDS = 30.0
_STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Served:
    """Where things listen."""

    url: str
    engine_url: str


@contextmanager
def polar_serve(policy: Path, run_dir: Path, *, workers: int) -> Iterator[Served]:
    """Raises RuntimeError with the end of its log when it does not come up."""
    command = [sys.executable, "-m", "polar", "serve", "--engine", "embedded", "--model", str(policy)]
    command += ["--data", str(run_dir / "data"), "--port", "0", "--gateway-port", "0", "--json"]
    command += [f"--init-workers={workers}", f"--run-workers={workers}", f"--postrun-workers={workers}"]
    log = run_dir / "serve.log"
    with (
        log.open("wb") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, start_new_session=True) as process,
    ):
        ended = threading.Event()
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line:
                raise RuntimeError(f"polar serve did not come up; the end of {log}:\n{log.read_text()[-2000:]}")
            told = json.loads(line)
            threading.Thread(target=_watch, args=(process, log, ended), daemon=True).start()
            yield Served(url=told["url"], engine_url=told["engine_url"])
        finally:
            ended.set()
            _stop(process)


def _watch(process: subprocess.Popen[bytes], log: Path, ended: threading.Event) -> None:
    """The rollout function would wait for a server that comes back; this one will not."""
    process.wait()
    if not ended.is_set():
        print(f"polar serve has ended; the end of {log}:\n{log.read_text()[-2000:]}", file=sys.stderr)
        _thread.interrupt_main()


def update_weights(engine_url: str, folder: Path, version: int) -> None:
    """What Slime does after each step. Raises httpx.HTTPError."""
    body = {"model_path": str(folder), "weight_version": str(version)}
    with httpx.Client(base_url=engine_url, timeout=_UPDATE_SECONDS) as engine:
        for path, content in (
            ("/pause_generation", {}),
            ("/update_weights_from_disk", body),
            ("/continue_generation", {}),
        ):
            engine.post(path, json=content).raise_for_status()


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
