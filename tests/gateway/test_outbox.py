"""The outbox between a dying gateway, a line that breaks and a real server: every end arrives, with its log."""

from __future__ import annotations

import asyncio
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.server.conftest import TOKEN, Server

from peers.node import Node, done
from peers.relay import CuttingRelay
from polar.codec import to_msgpack
from polar.gateway.link import PART_BYTES, ServerLink
from polar.gateway.outbox import Outbox
from polar.nodeapi import Lease, NodeResult
from polar.records import SessionStatus
from polar.sessionlog import Header, LogWriter, parse, unpack

SIZE = 3 * PART_BYTES


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    made = Server(tmp_path_factory.mktemp("server") / "data")
    yield made
    made.kill()


@pytest.fixture
def outbox(tmp_path: Path) -> Outbox:
    return Outbox(tmp_path / "outbox")


def leased(server: Server, name: str, **task: Any) -> tuple[Node, Lease]:
    assert server.submit(name, **task).status_code == 200
    node = server.node(f"node-of-{name}")
    (lease,) = node.lease()
    return node, lease


def ended(lease: Lease, node: Node) -> NodeResult:
    return done(lease, node, log_sha256=None)


def write_log(outbox: Outbox, lease: Lease, size: int = 0) -> Path:
    """A log of `size` bytes that do not get smaller, or one with a header alone."""
    path = outbox.log_path(lease.session_id, lease.attempt)
    if size:
        path.write_bytes(os.urandom(size))
        return path
    header = Header(session_id=lease.session_id, task_id="task", attempt=lease.attempt, model="policy", created_at=0.0)
    with LogWriter(path, header) as writer:
        writer.seal()
    return path


def deliver(outbox: Outbox, url: str, path: Path | None = None) -> list[bool]:
    async def story() -> list[bool]:
        async with ServerLink(url, TOKEN) as link:
            return [await outbox.deliver(each, link) for each in ([path] if path else outbox.waiting())]

    return asyncio.run(asyncio.wait_for(story(), 60))


def log_of(server: Server, lease: Lease) -> bytes:
    path = f"/tasks/{lease.task['task_id']}/sessions/{lease.session_id}/log"
    answer = server.http.get(path, params={"attempt": lease.attempt})
    answer.raise_for_status()
    return answer.content


def fault_of(server: Server, lease: Lease) -> tuple[str, str]:
    (result,) = server.task(lease.task["task_id"])["results"]
    return result["metadata"]["fault"], result["error"]


# The line breaks


@pytest.mark.parametrize("cuts", [(SIZE // 2,), (PART_BYTES // 3, SIZE // 2, SIZE + PART_BYTES // 3)])
def test_an_upload_that_was_cut_goes_on_where_it_stood(server: Server, outbox: Outbox, cuts: tuple[int, ...]) -> None:
    node, lease = leased(server, f"cut-{len(cuts)}")
    data = write_log(outbox, lease, SIZE).read_bytes()
    path = outbox.put(ended(lease, node))
    relay = CuttingRelay(server.url, *cuts)
    assert deliver(outbox, relay.url, path) == [True]
    relay.close()
    assert relay.cuts == []
    assert unpack(log_of(server, lease)) == data
    assert relay.sent - SIZE < len(cuts) * PART_BYTES, "sent twice"
    assert list(outbox.folder.iterdir()) == []


def test_a_server_that_has_other_bytes_asks_for_them_anew(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "other-bytes")
    data = write_log(outbox, lease, SIZE).read_bytes()
    path = outbox.put(ended(lease, node))
    node.upload(lease, os.urandom(PART_BYTES))
    assert deliver(outbox, server.url, path) == [True]
    assert unpack(log_of(server, lease)) == data


def test_a_server_that_has_too_many_bytes_asks_for_them_anew(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "too-many-bytes")
    log = write_log(outbox, lease).read_bytes()
    path = outbox.put(ended(lease, node))
    node.upload(lease, os.urandom(10_000))
    assert deliver(outbox, server.url, path) == [True]
    assert unpack(log_of(server, lease)) == log


def test_a_big_log_costs_neither_side_its_size_in_memory(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "big")
    write_log(outbox, lease, 96 << 20)
    assert server.process is not None
    before, there = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, peak_of(server.process.pid)
    assert deliver(outbox, server.url, outbox.put(ended(lease, node))) == [True]
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 48 << 10
    assert peak_of(server.process.pid) - there < 48 << 10


def peak_of(pid: int) -> int:
    """KiB."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0])


# The server says no


def test_a_wrong_token_costs_no_result(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "token")
    write_log(outbox, lease)
    path = outbox.put(ended(lease, node))

    async def impatient() -> None:
        async with ServerLink(server.url, "another token") as link, asyncio.timeout(2):
            await outbox.deliver(path, link)

    with pytest.raises(TimeoutError):
        asyncio.run(impatient())
    assert deliver(outbox, server.url) == [True]
    assert server.task("token")["status"] == "completed"


@pytest.mark.parametrize("malformed", [True, False])
def test_a_result_that_is_refused_for_good_is_kept_aside(server: Server, outbox: Outbox, malformed: bool) -> None:
    """Of a session that the server does not know, or with a status that no result can have."""
    node, lease = leased(server, f"refused-{malformed}")
    write_log(outbox, lease)
    change = {"status": SessionStatus.RUNNING} if malformed else {"session_id": "of-another-server"}
    result = msgspec.structs.replace(ended(lease, node), **change)
    if not malformed:
        outbox.log_path(lease.session_id, 1).rename(outbox.log_path(result.session_id, 1))
    assert deliver(outbox, server.url, outbox.put(result)) == [False]
    kept = {f"{result.session_id}.1.result.refused", f"{result.session_id}.1.log.zst.refused"}
    assert {path.name for path in outbox.folder.iterdir()} == kept
    outbox.rescue(node.node_id, 2)
    assert {path.name for path in outbox.folder.iterdir()} == kept


# What an earlier life has left


def test_an_attempt_that_died_is_reported_with_its_log(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "died", max_attempts=1)
    log = write_log(outbox, lease).read_bytes()
    outbox.rescue(node.node_id, 2)
    assert deliver(outbox, server.url) == [True]
    assert unpack(log_of(server, lease)) == log
    assert fault_of(server, lease)[0] == "gateway_lost"
    assert list(outbox.folder.iterdir()) == []


@pytest.mark.parametrize("damage", [b"", b"\x00", b"half of it"])
def test_a_result_that_cannot_be_read_is_kept_aside_and_its_attempt_reported_lost(
    server: Server, outbox: Outbox, damage: bytes
) -> None:
    node, lease = leased(server, f"unreadable-{len(damage)}", max_attempts=1)
    log = write_log(outbox, lease).read_bytes()
    path = outbox.put(ended(lease, node))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] if damage.startswith(b"half") else damage)
    outbox.rescue(node.node_id, 2)
    assert deliver(outbox, server.url) == [True]
    assert unpack(log_of(server, lease)) == log
    fault, error = fault_of(server, lease)
    assert fault == "outbox_unreadable"
    assert path.name in error
    (kept,) = outbox.folder.iterdir()
    assert kept.name == f"{path.name}.unreadable"
    outbox.rescue(node.node_id, 3)
    assert outbox.waiting() == []


@pytest.mark.parametrize("missing", [False, True])
def test_a_result_whose_log_is_another_or_gone_is_kept_aside(server: Server, outbox: Outbox, missing: bool) -> None:
    node, lease = leased(server, f"no-log-{missing}", max_attempts=1)
    write_log(outbox, lease)
    path = outbox.put(ended(lease, node))
    packed = path.with_suffix(".log.zst")
    packed.unlink() if missing else packed.write_bytes(packed.read_bytes()[:-3])
    outbox.rescue(node.node_id, 2)
    assert deliver(outbox, server.url) == [True]
    assert fault_of(server, lease)[0] == "outbox_unreadable"


def test_a_result_of_another_attempt_than_its_name_says_is_kept_aside(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "misnamed", max_attempts=1)
    path = outbox.put(ended(lease, node))
    other = msgspec.structs.replace(ended(lease, node), attempt=7)
    path.write_bytes(to_msgpack(other))
    outbox.rescue(node.node_id, 2)
    assert deliver(outbox, server.url) == [True]
    assert fault_of(server, lease)[0] == "outbox_unreadable"


def test_what_was_half_written_or_half_deleted_is_gone(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "half")
    write_log(outbox, lease)
    path = outbox.put(ended(lease, node))
    complete = sorted(outbox.folder.iterdir())
    name = f"{lease.session_id}.{lease.attempt}"
    for ending in ("part", "log.zst.part", "log"):  # the log: killed between the result's rename and its deletion
        (outbox.folder / f"{name}.{ending}").write_bytes(b"half")
    (outbox.folder / "answered-s0-1.2.log.zst").write_bytes(b"its result was deleted already")
    outbox.rescue(node.node_id, 2)
    assert sorted(outbox.folder.iterdir()) == complete
    assert deliver(outbox, server.url, path) == [True]
    assert server.task("half")["results"][0]["metadata"]["termination"] == "done"


def test_a_foreign_file_stops_nothing(outbox: Outbox) -> None:
    for name in ("notes.log", "x.y.result", "folder"):
        (outbox.folder / name).write_text("what is this?")
    outbox.rescue("node-a", 2)
    assert outbox.waiting() == []
    assert (outbox.folder / "notes.log").read_text() == "what is this?"


def test_a_log_torn_in_its_last_record_is_kept_as_it_is(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "torn", max_attempts=1)
    log = write_log(outbox, lease)
    log.write_bytes(log.read_bytes()[:-5])
    outbox.rescue(node.node_id, 2)
    assert deliver(outbox, server.url) == [True]
    stored = parse(unpack(log_of(server, lease)))
    assert (stored.torn, stored.sealed) == (True, None)


def test_an_attempt_that_died_before_its_first_record_has_no_log(server: Server, outbox: Outbox) -> None:
    node, lease = leased(server, "too-early", max_attempts=1)
    outbox.log_path(lease.session_id, 1).touch()
    outbox.rescue(node.node_id, 2)
    assert deliver(outbox, server.url) == [True]
    path = f"/tasks/{lease.task['task_id']}/sessions/{lease.session_id}/log"
    assert server.http.get(path).status_code == 404
    assert fault_of(server, lease)[0] == "gateway_lost"
    assert list(outbox.folder.iterdir()) == []
