"""A full disk refuses new tasks, and running sessions finish as soon as there is room for them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.peers.node import Node
from tests.server.conftest import Server, eventually

SIZE = 80 << 20


class SmallDisk(Server):
    """Its folder is a file system of 80 MB, of its own namespace; `ballast` is a file there."""

    def command(self) -> list[str]:
        bare = super().command()
        mount = ["--dev-bind", "/", "/", "--size", str(SIZE), "--tmpfs", str(self.folder), "--die-with-parent"]
        return ["bwrap", *mount, *bare]

    @property
    def ballast(self) -> Path:
        assert self.process is not None
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return Path(f"/proc/{children[0]}/root{self.folder}/ballast")

    def fill(self, left: int) -> None:
        free = shutil.disk_usage(self.ballast.parent).free
        with self.ballast.open("ab") as file:
            file.write(bytes(max(0, free - left)))


@pytest.fixture
def small(tmp_path: Path) -> Any:
    folder = tmp_path / "data"
    folder.mkdir()
    probe = ["bwrap", "--dev-bind", "/", "/", "--size", "4096", "--tmpfs", str(folder), "true"]
    if shutil.which("bwrap") is None or subprocess.run(probe, capture_output=True).returncode != 0:
        pytest.skip("needs bubblewrap with --size, to make a small file system")
    server = SmallDisk(folder)
    yield server
    server.kill()


def test_full_disk_refuses_new_tasks_and_loses_none(small: SmallDisk) -> None:
    node: Node = small.node()
    small.submit("before", num_samples=2)
    leases = node.lease(2)
    assert node.finish(leases[0]).accepted
    small.fill(left=32 << 20)
    refused = small.submit("after")
    assert refused.status_code == 507
    assert "full" in refused.json()["detail"]
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
    small.ballast.unlink()
    assert node.finish(lease).accepted
    assert small.task("stuck")["completed_sessions"] == 1
    eventually(lambda: small.submit("after").status_code == 200)
