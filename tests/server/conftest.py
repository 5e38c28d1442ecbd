"""Real servers in processes of their own, real receivers of callbacks; all of them end with their test."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.peers.node import Node

from polar.config import TOKEN_HEADER

TOKEN = "token-of-the-test"


class Server:
    """A rollout server that can be killed and started again on the same folder."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder = folder
        self.settings = {"port": 0, "save_dir": str(folder)} | settings
        self.process: subprocess.Popen[str] | None = None
        self.url = ""
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.command(), stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.url = self.process.stdout.readline().strip()
        assert self.url, "the server did not start"
        threading.Thread(target=self.process.stdout.read, daemon=True).start()  # or a full pipe would stop it
        self.settings["port"] = int(self.url.rsplit(":", 1)[1])
        self.http = httpx.Client(base_url=self.url, headers={TOKEN_HEADER: TOKEN}, timeout=30, trust_env=False)

    def command(self) -> list[str]:
        script = Path(__file__).with_name("serve.py")
        return [sys.executable, str(script), json.dumps(self.settings), TOKEN]

    def kill(self) -> None:
        assert self.process is not None
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(20)

    @property
    def memory(self) -> int:
        """Bytes that it has had at most."""
        assert self.process is not None
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return 1024 * int(status.partition("VmHWM:")[2].split()[0])

    def restart(self) -> None:
        self.kill()
        self.start()

    def node(self, node_id: str = "node-a", **facts: Any) -> Node:
        return Node(self.url, TOKEN, node_id, **facts)

    def submit(self, task_id: str = "task", **fields: Any) -> httpx.Response:
        return self.http.post("/rollout/task/submit", json=task(task_id, **fields))

    def declare(self, method: str, path: str, size: int) -> tuple[int, str]:
        """Status and detail of the answer to a request of `size` bytes of which none is sent."""
        connection = http.client.HTTPConnection("127.0.0.1", self.settings["port"], timeout=20)
        connection.putrequest(method, path)
        for name, value in {TOKEN_HEADER: TOKEN, "Content-Type": "application/json", "Content-Length": size}.items():
            connection.putheader(name, str(value))
        connection.endheaders()
        answer = connection.getresponse()
        detail = json.loads(answer.read())["detail"]
        connection.close()
        return answer.status, detail

    def task(self, task_id: str = "task", **params: Any) -> dict[str, Any]:
        answer = self.http.get(f"/rollout/task/{task_id}", params=params)
        answer.raise_for_status()
        document: dict[str, Any] = answer.json()
        return document


def task(task_id: str = "task", **fields: Any) -> dict[str, Any]:
    agent = {"harness": "shell", "custom_shell": {"command": "true"}}
    return {"task_id": task_id, "instruction": "say hello", "agent": agent} | fields


def eventually(look: Callable[[], Any], seconds: float = 20.0) -> Any:
    """What `look` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < deadline, f"it never came true: {look}"
        time.sleep(0.02)
    return found


@pytest.fixture
def make_server(tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """For tests that kill their server, or need one with settings of its own."""
    servers: list[Server] = []

    def make(**settings: Any) -> Server:
        servers.append(Server(tmp_path / f"data-{len(servers)}", **settings))
        return servers[-1]

    yield make
    for server in servers:
        server.kill()


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def server(one_server: Server) -> Iterator[Server]:
    """The module's server; what a test leaves there does not reach the next."""
    yield one_server
    for name, status in one_server.http.get("/rollout/status").json()["tasks"].items():
        if status == "running":
            one_server.http.delete(f"/rollout/task/{name}")
