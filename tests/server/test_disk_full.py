"""A full disk refuses new tasks; what runs finishes where it can; nothing that is not on disk is called done; once
there is room, everything goes on by itself."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest
from tests.peers.node import Node
from tests.server.conftest import Server, eventually

from polar.nodeapi import Lease

SIZE = 80 << 20
PAGE = 4096
DISK = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(SIZE), "--tmpfs"]


class SmallDisk(Server):
    """Its folder is a file system of 80 MB, of a namespace of its own, that outlives the server."""

    def __init__(self, folder: Path) -> None:
        self.holder = subprocess.Popen([*DISK, str(folder), "sleep", "infinity"])
        self._inside = eventually(lambda: _child(self.holder.pid))
        super().__init__(folder)

    def command(self) -> list[str]:
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        return ["nsenter", "--target", str(self._inside), "--mount", *user, *super().command()]

    @property
    def disk(self) -> Path:
        return Path(f"/proc/{self._inside}/root{self.folder}")

    def fill(self, left: int) -> None:
        free = shutil.disk_usage(self.disk).free
        with (self.disk / "ballast").open("ab") as file:
            file.write(bytes(max(0, free - left)))

    def make_room(self) -> None:
        (self.disk / "ballast").unlink()


def _child(pid: int) -> int | None:
    """The process in the new namespace, once its program runs."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    comm = Path(f"/proc/{children[0]}/comm").read_text() if children else ""
    return int(children[0]) if comm == "sleep\n" else None


@pytest.fixture
def small(tmp_path: Path) -> Iterator[SmallDisk]:
    folder = tmp_path / "data"
    folder.mkdir()
    programs = shutil.which("bwrap") and shutil.which("nsenter")
    if not programs or subprocess.run([*DISK, str(folder), "true"], capture_output=True).returncode != 0:
        pytest.skip("needs nsenter, and bubblewrap with --size, to make a small file system")
    server = SmallDisk(folder)
    yield server
    server.kill()
    server.holder.kill()
    server.holder.wait()


def test_full_disk_refuses_new_tasks_and_loses_none(small: SmallDisk) -> None:
    node: Node = small.node()
    small.submit("before", num_samples=2)
    leases = node.lease(2)
    assert node.finish(leases[0]).accepted
    small.fill(left=32 << 20)
    refused = small.submit("after")
    assert refused.status_code == 507
    assert f"the disk of {small.folder} is full (" in refused.json()["detail"]
    assert "rollout.retain_gb" in refused.json()["detail"]
    assert small.http.get("/rollout/task/after").status_code == 404
    assert node.finish(leases[1]).accepted, "there is room for what is running"
    assert small.task("before")["status"] == "completed"


def test_result_that_finds_no_room_is_taken_later(small: SmallDisk) -> None:
    node: Node = small.node()
    small.submit("stuck")
    (lease,) = node.lease()
    small.fill(left=0)
    with pytest.raises(httpx.HTTPStatusError, match="507"):
        node.finish(lease, harness_log="x" * 100_000)
    small.make_room()
    assert node.finish(lease).accepted
    assert small.task("stuck")["completed_sessions"] == 1
    assert list((small.disk / "tasks" / "stuck").glob("*.part")) == []
    eventually(lambda: small.submit("after").status_code == 200)


def test_what_could_not_be_saved_is_not_told(small: SmallDisk) -> None:
    """Log and result have room, the database has none: to the gateway and to the trainer nothing has happened yet."""
    node: Node = small.node()
    small.submit("unsaved")
    small.submit("other")
    leases = {lease.task["task_id"]: lease for lease in node.lease(2)}
    small.fill(left=3 * PAGE)
    for _ in range(2):
        with pytest.raises(httpx.HTTPStatusError, match="507"):
            node.finish(leases["unsaved"])
    assert result_file(small, leases["unsaved"]).is_file()
    assert small.http.get("/rollout/task/unsaved").status_code == 507
    assert small.task("other")["status"] == "running"
    eventually(lambda: small.http.get("/rollout/status").json()["storage"]["full"])
    assert small.http.get("/rollout/status").json()["tasks"]["unsaved"] == "running"
    small.make_room()
    assert node.finish(leases["unsaved"]).accepted
    assert small.task("unsaved")["status"] == "completed"


def result_file(small: SmallDisk, lease: Lease) -> Path:
    return small.disk / "tasks" / lease.task["task_id"] / f"{lease.session_id}.{lease.attempt}.result"


def test_waiting_sessions_wait_for_room(small: SmallDisk) -> None:
    node: Node = small.node()
    small.submit("waiting", num_samples=2)
    node.lease()
    small.fill(left=32 << 20)
    eventually(lambda: small.task("waiting")["waiting_for"] == "room on the rollout server's disk")
    leases: list[Lease] = []
    asking = threading.Thread(target=lambda: leases.extend(node.lease()))
    asking.start()
    small.make_room()
    asking.join(30)
    assert [lease.session_index for lease in leases] == [1]


def test_server_that_is_killed_on_a_full_disk_comes_back(small: SmallDisk) -> None:
    node: Node = small.node()
    small.submit("before", num_samples=2)
    leases = node.lease(2)
    assert node.finish(leases[0]).accepted
    small.fill(left=0)
    with pytest.raises(httpx.HTTPStatusError, match="507"):
        node.finish(leases[1])
    small.restart()
    assert small.task("before")["completed_sessions"] == 1
    assert small.submit("after").status_code == 507
    small.make_room()
    assert node.finish(leases[1]).accepted
    assert small.task("before")["status"] == "completed"
    eventually(lambda: small.submit("after").status_code == 200)


def test_folder_that_has_gone_keeps_nothing_new_and_may_come_back(make_server: Callable[..., Server]) -> None:
    server = make_server()
    assert server.submit("before").status_code == 200
    away = server.folder.with_name("away")
    server.folder.rename(away)
    assert server.submit("lost").status_code == 503
    server.folder.mkdir()
    answer = server.submit("lost")
    assert (answer.status_code, "another folder has taken its place" in answer.json()["detail"]) == (503, True)
    assert eventually(lambda: server.task("before")["waiting_for"] == "room on the rollout server's disk")
    server.folder.rmdir()
    away.rename(server.folder)
    assert server.submit("after").status_code == 200
    server.restart()
    assert [server.http.get(f"/rollout/task/{name}").status_code for name in ("before", "after")] == [200, 200]
