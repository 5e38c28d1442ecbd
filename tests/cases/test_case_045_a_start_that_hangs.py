"""Case 45: a runtime whose start hangs costs the budget of INIT, and the agent's budget has nothing of the set-up."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from chain import Chain, polar_serve
from gateway_processes import left_behind, processes_with
from peers.engine import ScriptedEngine
from peers.harness import scripted
from sandboxing import needs_bubblewrap

pytestmark = needs_bubblewrap
SLACK = 6.0
"""seconds; of a busy machine. In virtual time the budget is exact: see the tests of the stages' clock"""
HANGS = """#!/bin/sh
case "$*" in *info-fd*) exec sleep 60045 ;; esac
exec {bwrap} "$@"
"""
"""a bwrap that passes the trial at the gateway's start, and then hangs"""


@pytest.fixture
def chain(tmp_path: Path, engine: ScriptedEngine) -> Iterator[Chain]:
    with polar_serve(tmp_path / "data", engine.url) as made:
        yield made


def ended(result: dict[str, Any], budget: float) -> None:
    assert (result["status"], result["metadata"]["termination"]) == ("ERROR", "sandbox_start"), result
    assert f"the budget of init, {budget:g} s, is spent" in result["error"]
    assert budget <= result["timing"]["init_ms"] / 1000 < budget + SLACK


def test_a_plug_in_that_never_starts(chain: Chain) -> None:
    steps = scripted(("call", "hello"), import_path="peers.broken:HangingStart")
    (result,) = chain.run("hangs", max_attempts=1, budgets={"init": 2}, **steps)
    ended(result, 2)
    assert left_behind(chain.data / "gateway", []) == []


def test_a_bubblewrap_that_hangs(tmp_path: Path, engine: ScriptedEngine) -> None:
    fake = tmp_path / "programs" / "bwrap"
    fake.parent.mkdir()
    fake.write_text(HANGS.format(bwrap=shutil.which("bwrap")))
    fake.chmod(0o755)
    with polar_serve(tmp_path / "data", engine.url, path=f"{fake.parent}:/usr/bin:/bin") as chain:
        (result,) = chain.run("hangs", max_attempts=1, budgets={"init": 2}, **scripted(("call", "hello")))
        ended(result, 2)
        assert processes_with("sleep 60045") == []
        assert list((chain.data / "gateway" / "sandboxes").iterdir()) == []


def test_a_set_up_longer_than_the_agents_budget_costs_the_agent_nothing(chain: Chain) -> None:
    slow = [{"type": "exec", "command": "sleep 6"}]
    steps = scripted(("call", "hello"), ("write", "$ARTIFACTS_DIR/done"), prepare=slow)
    (result,) = chain.run("slow", timeout_seconds=5, **steps)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done")
    assert result["timing"]["init_ms"] > 6000


def test_a_set_up_that_hangs_is_the_tasks_fault(chain: Chain) -> None:
    hangs = [{"type": "exec", "command": "exec sleep 60046"}]
    (result,) = chain.run("stuck", budgets={"init": 2}, **scripted(("call", "hello"), prepare=hangs))
    assert (result["status"], result["metadata"]["termination"]) == ("ERROR", "prepare")
    assert "the budget of init, 2 s, is spent" in result["error"]
    assert processes_with("sleep 60046") == []
