"""The examples do what they say, as `polar run` runs them."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from chain import Chain
from peers.engine import ScriptedEngine

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.skipif(
    not Path(shutil.which("python3", path="/usr/bin:/bin") or "/none").exists(),
    reason="the example's agent wants the system's own python3, and there is none",
)
def test_hello(chain: Chain, engine: ScriptedEngine) -> None:
    engine.script(*[{"text": "hello"}] * 3, {"text": "good day"})
    command = [sys.executable, "-m", "polar", "run", str(EXAMPLES / "hello.yaml"), "--server", chain.url, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert "hello" in json.dumps(told)
    rewards = [result["trajectory"]["traces"][0]["reward"] for result in chain.results("hello")]
    assert sorted(rewards) == [0.0, 1.0, 1.0, 1.0]
