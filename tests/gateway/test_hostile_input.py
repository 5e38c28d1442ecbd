"""Input that nobody should have let in, at the doors of server, terminal and command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from chain import Chain
from peers.harness import scripted


def test_half_a_surrogate_pair_is_a_422_that_names_the_field(chain: Chain) -> None:
    body = rb'{"task_id": "s\ud800", "instruction": "x", "agent": {"harness": "mini_swe_agent"}}'
    headers = {"Content-Type": "application/json"}
    answer = chain.http.post("/rollout/task/submit", content=body, headers=headers)
    assert answer.status_code == 422, answer.text
    assert "task_id" in answer.text


def test_what_a_harness_prints_is_shown_and_not_obeyed(chain: Chain) -> None:
    steps = scripted(("call", "hello"), ("say", "red: \x1b[31m title: \x1b]0;owned\x07 \x9b31m"))
    (result,) = chain.run("escapes", **steps)
    command = [sys.executable, "-m", "polar", "show", result["session_id"], "--server", chain.url]
    shown = subprocess.run(command, capture_output=True, check=True, text=True).stdout
    assert "owned" in shown
    assert not {"\x1b", "\x07", "\x9b"} & set(shown)


def test_an_unknown_default_runtime_is_refused_at_start(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polar", "serve", "--engine-url", "http://127.0.0.1:9", "--runtime", "nope"]
    command += ["--port", "0", "--gateway-port", "0", "--data", str(tmp_path / "data")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "'nope': known are bubblewrap, local" in done.stderr
