"""The events stream: what happens is told as it happens, to everybody who keeps up."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import pytest
from tests.server.conftest import Server, eventually

from polar.server.events import BACKLOG


def events(stream: httpx.Response) -> Iterator[dict[str, Any]]:
    """Each event's envelope; its name and its line of data say the same."""
    name = ""
    for line in stream.iter_lines():
        field, _, value = line.partition(": ")
        if field == "event":
            name = value
        elif field == "data":
            event = json.loads(value)
            assert set(event) == {"type", "ts", "data"}
            assert event["type"] == name
            assert abs(event["ts"] - time.time()) < 60
            yield event


def until(stream: Iterator[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    seen = []
    for event in stream:
        seen.append(event)
        if event["type"] == kind:
            break
    return seen


def test_a_tasks_life_is_told_in_order(server: Server) -> None:
    node = server.node()
    node.poll()
    with server.http.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        told = events(stream)
        assert next(told) | {"ts": 0} == {"type": "hello", "ts": 0, "data": {}}
        server.submit("watched")
        (lease,) = node.lease()
        node.finish(lease)
        seen = [(event["type"], event["data"]) for event in until(told, "task.completed")]
    session = {"session_id": lease.session_id, "task_id": "watched"}
    assert seen == [
        ("task.created", {"task_id": "watched", "num_samples": 1}),
        ("session.state_changed", session | {"status": "INITIALIZING"}),
        ("session.state_changed", session | {"status": "COMPLETED"}),
        ("task.updated", {"task_id": "watched", "completed_sessions": 1}),
        ("task.completed", {"task_id": "watched", "status": "completed"}),
    ]


@pytest.mark.slow
def test_silence_is_broken_by_pings(server: Server) -> None:
    with server.http.stream("GET", "/events", timeout=40) as stream:
        began = time.monotonic()
        assert [event["type"] for event in until(events(stream), "ping")] == ["hello", "ping"]
        assert 14 < time.monotonic() - began < 40


def test_who_comes_back_hears_hello_and_what_happens_then(server: Server) -> None:
    for name in ("first", "second"):
        with server.http.stream("GET", "/events") as stream:
            told = events(stream)
            assert next(told)["type"] == "hello"
            server.submit(name)
            assert next(told)["data"]["task_id"] == name


@contextmanager
def one_who_never_reads(server: Server) -> Iterator[socket.socket]:
    with socket.socket() as idle:
        idle.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        idle.connect(("127.0.0.1", server.settings["port"]))
        idle.sendall(b"GET /events HTTP/1.1\r\nHost: localhost\r\n\r\n")
        yield idle


@pytest.mark.slow
def test_who_does_not_keep_up_is_let_go_and_delays_nobody(make_server: Callable[..., Server]) -> None:
    """More than what an onlooker may be behind, and than what connections hold (some megabytes)."""
    server = make_server()
    groups = [f"group-{number}" for number in range(5)]
    counted: dict[str, int] = {}
    with one_who_never_reads(server) as idle, server.http.stream("GET", "/events") as stream:
        told = events(stream)
        assert next(told)["type"] == "hello"
        reading = threading.Thread(target=count, args=(told, len(groups), counted))
        reading.start()
        for name in groups:
            server.submit(name, num_samples=10_000)
            assert server.http.delete(f"/rollout/task/{name}", timeout=120).json()["status"] == "cancelled"
        reading.join(120)
        expected = {"task.created": 5, "session.state_changed": 50_000, "task.updated": 50_000, "task.completed": 5}
        assert counted == expected
        assert sum(counted.values()) > 2 * BACKLOG
        idle.settimeout(60)
        assert whole(idle).endswith(b"0\r\n\r\n"), "its stream has ended in good order"


def count(told: Iterator[dict[str, Any]], tasks: int, counted: dict[str, int]) -> None:
    while counted.get("task.completed", 0) < tasks:
        kind = next(told)["type"]
        if kind != "ping":
            counted[kind] = counted.get(kind, 0) + 1


def whole(connection: socket.socket) -> bytes:
    taken = b""
    while not taken.endswith(b"\r\n0\r\n\r\n"):
        more = connection.recv(1 << 20)
        assert more, "cut off"
        taken = taken[-100:] + more
    return taken


def test_onlookers_who_have_gone_are_forgotten(server: Server) -> None:
    for _ in range(20):
        with server.http.stream("GET", "/events") as stream:
            assert next(events(stream))["type"] == "hello"
    assert eventually(lambda: connections(server) <= 2)


def connections(server: Server) -> int:
    """Sockets that the server has open, its listener aside."""
    assert server.process is not None
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(row[1].endswith(f":{server.settings['port']:04X}") and row[3] == "01" for row in rows)
