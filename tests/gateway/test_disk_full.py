"""A disk that a harness fills to the last byte: an infrastructure fault by its name, never a reward, and the gateway
goes on."""

from __future__ import annotations

import os
import random
import shutil
import string
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from chain import Chain, polar_serve, until
from peers.engine import ScriptedEngine
from peers.harness import scripted
from sandboxing import needs_bubblewrap

pytestmark = needs_bubblewrap
SIZE = 160 << 20


@pytest.fixture
def small(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Chain]:
    """Its whole data folder, the server's too, is a file system of 160 MB in a mount namespace of its own."""
    folder = tmp_path / "data"
    folder.mkdir()
    disk = ["bwrap", "--dev-bind", "/", "/", "--die-with-parent", "--size", str(SIZE), "--tmpfs", str(folder)]
    if not shutil.which("nsenter") or subprocess.run([*disk, "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs nsenter, and a bubblewrap with --size, to make a small file system")
    holder = subprocess.Popen([*disk, "sleep", "infinity"])
    try:
        until(lambda: child(holder.pid) is not None)
        user = [] if os.geteuid() == 0 else ["--user", "--preserve-credentials"]
        inside = ["nsenter", "--target", str(child(holder.pid)), "--mount", *user]
        with polar_serve(folder, engine.url, within=inside) as chain:
            yield chain
    finally:
        holder.kill()
        holder.wait()


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
