"""A disk that a harness fills to the last byte: an infrastructure fault by its name, never a reward, and the gateway
goes on."""

from __future__ import annotations

import os
import random
import resource
import shutil
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chain import Chain, polar_serve, until
from halves import polar_gateway, polar_server, topology
from peers.engine import ScriptedEngine
from peers.harness import scripted
from polar.sessionlog import parse, unpack
from sandboxing import needs_bubblewrap

pytestmark = needs_bubblewrap
SIZE = 160 << 20


class Disk:
    """A file system of 160 MB at `folder` in a mount namespace of its own, which `inside` enters."""

    def __init__(self, folder: Path, keeper: int) -> None:
        self.folder = folder
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        self.inside = ["nsenter", "--target", str(keeper), "--mount", *user]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    folder = tmp_path / "data"
    folder.mkdir()
    disk = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(SIZE), "--tmpfs", str(folder)]
    if not shutil.which("nsenter") or subprocess.run([*disk, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs nsenter, and a bubblewrap with --size, to make a small file system")
    holder = subprocess.Popen([*disk, "sleep", "infinity"])
    try:
        until(lambda: child(holder.pid) is not None)
        yield Disk(folder, child(holder.pid) or 0)
    finally:
        holder.kill()
        holder.wait()


@pytest.fixture
def small(disk: Disk, engine: ScriptedEngine) -> Iterator[Chain]:
    """The whole data folder, the server's too, is on the small disk."""
    with polar_serve(disk.folder, engine.url, within=disk.inside) as chain:
        yield chain


def child(parent: int) -> int | None:
    """The process in the new namespace, once its program runs."""
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    running = children and Path(f"/proc/{children[0]}/comm").read_text() == "sleep\n"
    return int(children[0]) if running else None


def test_it_is_named_retried_and_never_a_reward(small: Chain) -> None:
    more = "".join(random.Random(1).choices(string.ascii_letters, k=3000))  # more than the last page of a file holds
    steps = [("call", "hello"), ("write", "$ARTIFACTS_DIR/done"), ("fill", "$SESSION_DIR/big"), ("call", more)]
    (result,) = small.run("fills", **scripted(*steps))
    assert (result["status"], result["metadata"]["termination"]) == ("ERROR", "disk_full"), result
    assert (result["metadata"]["attempt"], result["trajectory"]) == (2, None)
    until(lambda: small.submit("next", **scripted(("call", "hi"), ("write", "$ARTIFACTS_DIR/done"))).status_code == 200)
    (after,) = small.results("next")
    assert after["trajectory"]["traces"][0]["reward"] == 1.0


def test_what_fills_it_while_it_is_graded_earns_nothing(small: Chain) -> None:
    """The evaluator's own writes fail; a command that fails for want of room is a command that failed, and that is
    seen: its reward file cannot be written."""
    steps = scripted(("call", "hello"), ("fill", "$SESSION_DIR/big"))
    evaluator = {"strategy": "command", "config": {"command": "true", "reward_file": "/session/artifacts/reward"}}
    (result,) = small.run("no-room-to-grade", evaluator=evaluator, **steps)
    assert result["status"] == "ERROR", result
    assert result["metadata"]["termination"] in ("disk_full", "evaluation")
    assert [trace["reward"] for trace in (result["trajectory"] or {"traces": []})["traces"]] in ([], [None])


def test_what_another_fills_is_no_failure_of_the_agents(disk: Disk, small: Chain, engine: ScriptedEngine) -> None:
    """The harness ends with an error, and the evaluator would give it 0; there is room again for the next attempt."""
    ballast = disk.folder / "ballast"
    asked = len(engine.requests)
    small.submit("innocent", **scripted(("call", "hello"), ("sleep", 2), ("write", "$ARTIFACTS_DIR/done")))
    until(lambda: len(engine.requests) > asked)
    subprocess.run([*disk.inside, "sh", "-c", f"cat /dev/zero > {ballast}"], stderr=subprocess.DEVNULL, check=False)
    until(lambda: small.stage("innocent") == ["REGISTERED"], 30)
    assert small.status("innocent")["waiting_for"] == "room on the rollout server's disk"
    subprocess.run([*disk.inside, "rm", str(ballast)], check=True)
    (result,) = small.results("innocent")
    assert (result["metadata"]["attempt"], result["metadata"]["termination"]) == (2, "done")
    assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [1.0]


def test_an_end_that_finds_no_room_is_told_and_its_log_comes_later(tmp_path: Path, engine: ScriptedEngine) -> None:
    """The gateway may write no file beyond its first 100 bytes from then on, its own messages included."""
    name, data = "no-room-at-the-end", tmp_path / "gateway"
    engine.script({"text": "first"}, {"text": "second", "hold": True})
    file = topology(tmp_path / "topology.yaml", engine.url, 0.2)
    steps = scripted(("call", "hello"), ("call", "again"), ("write", "$ARTIFACTS_DIR/done"))
    with polar_server(tmp_path / "server") as server:
        with polar_gateway(data, server, file) as gateway:
            until(lambda: server.node().get("healthy"))
            asked = len(engine.requests)
            server.submit(name, **steps)
            until(lambda: len(engine.requests) >= asked + 2)
            unlimited = resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE)
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, (100, unlimited[1]))
            engine.release()
            until(lambda: server.status(name)["status"] == "failed", 60)
            resource.prlimit(gateway.pid, resource.RLIMIT_FSIZE, unlimited)
            server.submit("next", **scripted(("call", "hi")))
            until(lambda: server.status("next")["status"] == "completed", 60)
        (result,) = server.http.get(f"/rollout/task/{name}").json()["results"]
        assert result["metadata"]["attempt"] == 2
        assert result["metadata"]["fault"] in ("disk_full", "io_error"), "a file too large is told by either"
        path = f"/tasks/{name}/sessions/{result['session_id']}/log"
        with polar_gateway(data, server, file):
            until(lambda: server.http.get(path, params={"attempt": 1}).status_code == 200)
            lost = parse(unpack(server.http.get(path, params={"attempt": 1}).content))
            assert lost.calls[0].finished is not None
            until(lambda: list((data / "outbox").iterdir()) == [])


def test_messages_that_find_no_room_cost_nothing(tmp_path: Path, engine: ScriptedEngine) -> None:
    """A session whose evaluation fails, which is logged, and a sound one, with a stderr that takes nothing."""
    nowhere = ["/bin/sh", "-c", 'exec "$@" 2>/dev/full', "sh"]
    steps = scripted(("call", "hello"), ("write", "$ARTIFACTS_DIR/done"))
    with polar_serve(tmp_path / "data", engine.url, within=nowhere) as chain:
        (result,) = chain.run("logged", evaluator={"strategy": "peers.broken:Broken"}, **steps)
        assert result["metadata"]["termination"] == "evaluation"
        (result,) = chain.run("sound", **steps)
        assert result["metadata"]["termination"] == "done"
