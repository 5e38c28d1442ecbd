"""A server and its gateways as processes of their own, so that one can stay while the other goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from polar.config import TOKEN_HEADER, TOKEN_VARIABLE

TOKEN = "token-of-the-test"
ENVIRONMENT = os.environ | {TOKEN_VARIABLE: TOKEN}


def topology(path: Path, engine_url: str, heartbeat: float) -> Path:
    """Of one node, node-0, on a free port."""
    node = {"id": "node-0", "port": 0, "inference": {"engine": "sglang", "base_url": engine_url}, "max_run_workers": 4}
    path.write_text(yaml.safe_dump({"gateway": {"heartbeat_interval_seconds": heartbeat, "nodes": [node]}}))
    return path


class ServerAlone:
    """A running `polar server`."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.http = httpx.Client(base_url=url, timeout=30, trust_env=False, headers={TOKEN_HEADER: TOKEN})

    def submit(self, task_id: str, **fields: Any) -> None:
        document = {"task_id": task_id, "instruction": "do it", "evaluator": {"strategy": "session_completed"}}
        self.http.post("/rollout/task/submit", json=document | fields).raise_for_status()

    def status(self, task_id: str) -> dict[str, Any]:
        return self.http.get(f"/rollout/task/{task_id}", params={"results": "false"}).json()

    def node(self) -> dict[str, Any]:
        return self.http.get("/nodes/node-0").json()


@contextmanager
def polar_server(folder: Path) -> Iterator[ServerAlone]:
    with _polar("server", "--port", "0", "--data", str(folder), "--json") as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "polar server did not come up"
        yield ServerAlone(json.loads(line)["url"])


@contextmanager
def polar_gateway(folder: Path, server: ServerAlone, topology: Path) -> Iterator[subprocess.Popen[str]]:
    """Does not wait until its engine is found healthy."""
    with _polar("gateway", "--topology", str(topology), "--server", server.url, "--data", str(folder)) as process:
        yield process


@contextmanager
def _polar(*command: str) -> Iterator[subprocess.Popen[str]]:
    argv = [sys.executable, "-m", "polar", *command]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(30)
