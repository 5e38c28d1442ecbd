"""A real rollout server, a scripted gateway that plays sessions as the test says, and a scripted trainer."""

from __future__ import annotations

import contextlib
import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.bridge.making import arguments
from tests.peers.node import Node, done, fault
from tests.peers.relay import Relay
from tests.peers.trainer import Trainer
from tests.server.conftest import TOKEN, Server, eventually

from polar.nodeapi import Cancel, Held, Lease, NodeResult
from polar.records import SessionStatus, TaskState, Termination
from slime_bridge import rollout
from slime_bridge.preflight_server import PROBE

Script = Callable[[Lease, Node], NodeResult | None]


class Gateway:
    """Finishes every leased session as `script` says; None leaves it running for ever. The bridge's own probe, which
    is cancelled at once, is no session of a test."""

    def __init__(self, server: Server, script: Script = done) -> None:
        self.script = script
        self.leases: list[Lease] = []
        self._cancels: list[Cancel] = []
        self._held: dict[str, Held] = {}
        self._ended: set[str] = set()
        self._lock = threading.Lock()
        self._node = server.node()
        self._stopped = threading.Event()
        self._node.poll()
        for each in (self._poll, self._work, self._end_cancelled):
            threading.Thread(target=each, daemon=True).start()

    def stop(self) -> None:
        """The threads end with the server, which holds their requests open."""
        self._stopped.set()

    def release(self) -> None:
        """Plays again what is left running, by the script as it is now."""
        held, self._node.held = {each.session_id for each in self._node.held}, []
        for lease in [each for each in self.leases if each.session_id in held]:
            self._play(lease)

    def tasks(self) -> list[dict[str, Any]]:
        """The tasks of the leases, once each, in the order of their coming."""
        return list({task["task_id"]: task for task in (each.task for each in self.leases)}.values())

    def _poll(self) -> None:
        while not self._stopped.wait(0.2):
            with contextlib.suppress(httpx.HTTPError):
                self._cancels += self._node.poll().cancels

    def _work(self) -> None:
        while not self._stopped.is_set():
            try:
                reply = self._node.work(64)
            except httpx.HTTPError:
                self._stopped.wait(0.05)
                continue
            self._cancels += reply.cancels
            for lease in reply.leases:
                self._play(lease)

    def _end_cancelled(self) -> None:
        while not self._stopped.wait(0.05):
            for cancel in list(self._cancels):
                self._end(cancel)

    def _end(self, cancel: Cancel) -> None:
        for lease in self.leases:
            if (lease.session_id, lease.attempt) == (cancel.session_id, cancel.attempt):
                self._cancels.remove(cancel)  # one that overtook its lease waits for it
                ended = fault(lease, self._node, termination=Termination.CANCELLED, retryable=False, fault=None)
                self._insist(partial(self._node.result, ended))
                self._let_go(lease)

    def _insist(self, call: Callable[[], Any]) -> None:
        """As a real gateway does: until the server has it."""
        while not self._stopped.is_set():
            try:
                call()
                return
            except httpx.HTTPError:
                self._stopped.wait(0.1)

    def finish(self, instruction: str) -> None:
        """Ends, well, the sessions of this task that it has left running."""
        begun = [each for each in self.leases if each.task["instruction"] == instruction]
        for lease in [each for each in begun if each.session_id not in self._ended]:
            eventually(lambda lease=lease: lease.session_id in self._held)
            self._deliver(lease, done(lease, self._node))

    def _hold(self, lease: Lease) -> None:
        with self._lock:
            held = Held(session_id=lease.session_id, attempt=lease.attempt, stage=SessionStatus.RUNNING)
            self._held[lease.session_id] = held
            self._node.held = list(self._held.values())

    def _let_go(self, lease: Lease) -> None:
        with self._lock:
            self._held.pop(lease.session_id, None)
            self._ended.add(lease.session_id)
            self._node.held = list(self._held.values())

    def _play(self, lease: Lease) -> None:
        if lease.task["task_id"].startswith(PROBE):
            self._insist(lambda: self._node.result(fault(lease, self._node, retryable=False)))
            return
        self.leases.append(lease)
        result = self.script(lease, self._node)
        if result is None:
            self._hold(lease)
        else:
            self._deliver(lease, result)

    def _deliver(self, lease: Lease, result: NodeResult) -> None:
        self._let_go(lease)
        log = f"log of {lease.session_id}".encode()
        self._insist(lambda: self._node.upload(lease, log))
        if result.traces is not None:
            result.log_sha256 = hashlib.sha256(log).hexdigest()
        self._insist(lambda: self._node.result(result))


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Gateway]]:
    server = Server(tmp_path_factory.mktemp("server"))
    gateway = Gateway(server)
    yield server, gateway
    gateway.stop()
    server.stop()


@pytest.fixture
def server(house: tuple[Server, Gateway], monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("POLAR_CONTROL_PLANE_TOKEN", TOKEN)
    return house[0]


def running(server: Server) -> list[str]:
    tasks = server.http.get("/tasks", params={"limit": 1000}).json()["tasks"]
    return [task["task_id"] for task in tasks if not TaskState(task["status"]).terminal]


@pytest.fixture
def gateway(house: tuple[Server, Gateway]) -> Gateway:
    """Nothing of an earlier test's comes to it any more."""
    eventually(lambda: running(house[0]) == [])
    house[1].script, house[1].leases = done, []
    return house[1]


@pytest.fixture
def relay(server: Server) -> Iterator[Relay]:
    between = Relay(server.url)
    yield between
    between.close()


@pytest.fixture
def make_trainer(server: Server, tmp_path: Path) -> Iterator[Callable[..., Trainer]]:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"p{number}"}) + "\n" for number in range(20)))

    def make(**changed: Any) -> Trainer:
        settings = {"polar_rollout_url": server.url, "prompt_data": str(prompts), "save": None, "load": None}
        return Trainer(arguments(**(settings | changed)))

    yield make
    rollout.close()
