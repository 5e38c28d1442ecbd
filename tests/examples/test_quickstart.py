"""The quickstart's agent and reward, from its YAML file through a real `polar serve` over a scripted model."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.examples.making import EXAMPLES, task_of

from chain import Chain
from peers.engine import ScriptedEngine
from sandboxing import needs_bubblewrap

ROW = {"prompt": "Calculate 5 - 3 - 6.", "label": "-4", "metadata": {"task": "basic_arithmetic"}}


@needs_bubblewrap
@pytest.mark.parametrize(
    ("said", "reward"),
    [
        (["<answer>-4</answer>"], 1.0),
        (["It is -4, I think.", "So be it: <answer> -4\n</answer>"], 1.0),
        (["<answer>4</answer>"], 0.0),
        (["<answer>-4 or 4</answer>"], 0.0),
        (["-4", "-4", "-4"], 0.0),
    ],
)
def test_only_the_right_answer_is_rewarded(
    tmp_path: Path, engine: ScriptedEngine, chain: Chain, said: list[str], reward: float
):
    task = task_of("slime_quickstart", ROW, tmp_path) | {"task_id": tmp_path.name}
    engine.script(*({"text": text} for text in said))
    (result,) = chain.run(**task)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done"), result
    (trace,) = result["trajectory"]["traces"]
    assert trace["reward"] == reward
    calls = result["trajectory"]["metadata"]["calls"]
    assert (calls["completions"], calls["continued"]) == (len(said), len(said) - 1)


@pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed: pip install it")
def test_prompt_data_of_reasoning_gym(tmp_path: Path):
    script = EXAMPLES / "slime_quickstart" / "prepare_data.py"
    subprocess.run([sys.executable, script, "--out", tmp_path, "--train", "60", "--eval", "12"], check=True)
    read = {
        name: [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("train", "eval")
    }
    assert {name: len(rows) for name, rows in read.items()} == {"train": 60, "eval": 12}
    rows = read["train"] + read["eval"]
    assert len({row["prompt"] for row in rows}) == 72
    assert all(row["label"].strip() for row in rows)
    several = subprocess.run([sys.executable, script, "--out", tmp_path, "--tasks", "countdown"], capture_output=True)
    assert several.returncode == 1
    assert b"countdown accepts several answers" in several.stderr
