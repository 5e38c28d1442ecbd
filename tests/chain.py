"""The whole chain as processes: `polar serve` in front of an engine, asked over HTTP. It ends with its test."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx

CHECK_ARTIFACT = {"strategy": "command", "config": {"command": 'test -f "$ARTIFACTS_DIR/done"'}}

_PATHS = [str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
_WITH_PLUGINS = os.environ | {"PYTHONPATH": os.pathsep.join(_PATHS)}
"""so that the gateway can import `peers.broken:Broken`"""


class Chain:
    """A running `polar serve`."""

    def __init__(self, url: str, gateway_url: str, data: Path, process: subprocess.Popen[str]) -> None:
        self.url, self.gateway_url, self.data, self.process = url, gateway_url, data, process
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False)

    def submit(self, task_id: str, **fields: Any) -> httpx.Response:
        document = {"task_id": task_id, "instruction": "do it", "evaluator": CHECK_ARTIFACT} | fields
        return self.http.post("/rollout/task/submit", json=document)

    def run(self, task_id: str, *, seconds: float = 60.0, **fields: Any) -> list[dict[str, Any]]:
        """The results of all sessions, in the order of the group."""
        answer = self.submit(task_id, **fields)
        assert answer.status_code == 200, answer.text
        return self.results(task_id, seconds=seconds)

    def results(self, task_id: str, *, seconds: float = 60.0) -> list[dict[str, Any]]:
        until(lambda: self.status(task_id)["status"] in ("completed", "failed", "cancelled"), seconds)
        results = self.http.get(f"/rollout/task/{task_id}").json()["results"]
        return sorted(results, key=lambda result: result["metadata"]["session_index"])

    def status(self, task_id: str) -> dict[str, Any]:
        return self.http.get(f"/rollout/task/{task_id}", params={"results": "false"}).json()

    def stage(self, task_id: str) -> list[str]:
        return [item["status"] for item in self.http.get(f"/tasks/{task_id}/sessions").json()["sessions"]]


@contextlib.contextmanager
def polar_serve(
    folder: Path, engine_url: str, *options: str, path: str | None = None, within: Sequence[str] = ()
) -> Iterator[Chain]:
    """`polar serve` on free ports with its data in `folder`; ready when it yields. `path` is its PATH, `within` a
    command that runs it."""
    command = [*within, sys.executable, "-m", "polar", "serve", "--engine-url", engine_url, "--data", str(folder)]
    command += ["--port", "0", "--gateway-port", "0", "--json", *options]
    errors = folder.with_name(folder.name + ".err")
    with errors.open("w") as stderr:
        env = _WITH_PLUGINS | ({"PATH": path} if path else {})
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"polar serve did not come up: {errors.read_text()}"
        told = json.loads(line)
        yield Chain(told["url"], told["gateway_url"], Path(told["data"]), process)
    finally:
        process.terminate()
        process.wait(30)


def until(holds: Callable[[], bool], seconds: float = 20.0) -> None:
    """Polls; fails when it does not hold in time."""
    deadline = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.02)
