"""SWE-Gym's example from a row of the data set to a reward: a real git repository, real tests, real sandboxes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.examples.making import EXAMPLES, module, task_of

from chain import Chain
from peers.engine import ScriptedEngine
from sandboxing import needs_bubblewrap

EXAMPLE = EXAMPLES / "swegym_slime_grpo"
ID = "demo__calc-1"
SOURCE = "def mean(numbers):\n    return sum(numbers) / 2\n"
OLD_TESTS = "from calc import mean\n\n\ndef test_two():\n    assert mean([1, 3]) == 2\n"
NEW_TEST = '\n\n@pytest.mark.parametrize("said", ["a b"])\ndef test_three(said):\n    assert mean([1, 2, 6]) == 3\n'
AGENT = """\
python3 - <<'END' && sh -x "$ARTIFACTS_DIR/todo.sh"
import json, os, urllib.request
request = urllib.request.Request(
    os.environ["OPENAI_BASE_URL"] + "/chat/completions",
    json.dumps({"model": "policy", "messages": [{"role": "user", "content": "What is to be done?"}]}).encode(),
    {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
)
with urllib.request.urlopen(request) as answer:
    said = json.load(answer)["choices"][0]["message"]["content"]
with open(os.environ["ARTIFACTS_DIR"] + "/todo.sh", "w") as file:
    file.write(said)
END
"""
"""does what the model says"""
RIGHT = "sed -i 's|/ 2|/ len(numbers)|' calc.py"
CHEATING = "printf 'def test_two(): pass\\ndef test_three(): pass\\n' > test_calc.py; cp test_calc.py test_more.py"
BROKEN = "rm -rf .git calc.py"


def git(folder: Path, *words: str) -> str:
    identity = ["-c", "user.name=A", "-c", "user.email=a@example.org", "-c", "init.defaultBranch=main"]
    return subprocess.run(["git", *identity, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One prompt, made by prepare_data.py from a row as the data set has it."""
    folder = tmp_path_factory.mktemp("swegym")
    checkout = folder / "checkouts" / ID
    checkout.mkdir(parents=True)
    git(checkout, "init", "-q")
    (checkout / "calc.py").write_text(SOURCE)
    (checkout / "test_calc.py").write_text(OLD_TESTS)
    git(checkout, "add", ".")
    git(checkout, "commit", "-q", "-m", "start")
    base = git(checkout, "rev-parse", "HEAD").strip()
    (checkout / "test_calc.py").write_text("import pytest\n" + OLD_TESTS + NEW_TEST)
    (checkout / "test_more.py").write_text("def test_more():\n    import calc\n")
    git(checkout, "add", "--intent-to-add", ".")
    patch = git(checkout, "diff")
    (checkout / "test_more.py").unlink()
    raw = {
        "instance_id": ID,
        "repo": "demo/calc",
        "base_commit": base,
        "problem_statement": "mean([1, 2, 6]) is 4.5 {but} 3 is right",
        "test_patch": patch,
        "FAIL_TO_PASS": json.dumps(["test_calc.py::test_three[a"]),  # as the data set has a name with a space
        "PASS_TO_PASS": ["test_calc.py::test_two", "test_more.py::test_more"],
    }
    (folder / "rows.jsonl").write_text(json.dumps(raw) + "\n" + json.dumps(raw | {"instance_id": "elsewhere"}) + "\n")
    command = [sys.executable, EXAMPLE / "prepare_data.py", "--rows", folder / "rows.jsonl", "--eval", "0"]
    command += ["--checkouts", folder / "checkouts", "--out", folder / "data"]
    command += ["--test-command", f"PYTEST_DISABLE_PLUGIN_AUTOLOAD=1 {sys.executable} -m pytest -rA --color=no --tb=no"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert "left out: 1 rows" in said
    (made,) = (folder / "data" / "train.jsonl").read_text().splitlines()
    return json.loads(made)


@pytest.fixture
def task(row: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The row's task; in place of /agents it sees the Python of these tests."""
    monkeypatch.syspath_prepend(EXAMPLE)
    made = task_of("swegym_slime_grpo", row, tmp_path)
    made["runtime"]["kwargs"]["bind"] = bound(sys.prefix, sys.base_prefix)
    return made | {"task_id": tmp_path.name}


def bound(*paths: str) -> list[str]:
    """Those that /usr does not hold already."""
    real = {os.path.realpath(path) for path in paths} | set(paths)
    return sorted(path for path in real if path != "/usr" and not path.startswith("/usr/"))


@needs_bubblewrap
@pytest.mark.parametrize(
    ("does", "reward", "solved"), [(RIGHT, 1.0, "1/1"), (CHEATING, 0.0, "0/1"), (BROKEN, 0.0, "0/1")]
)
def test_only_a_real_solution_is_rewarded(
    engine: ScriptedEngine, chain: Chain, task: dict[str, Any], does: str, reward: float, solved: str
):
    engine.script({"text": does})
    task["agent"] = {"harness": "shell", "custom_shell": {"command": AGENT}}
    (result,) = chain.run(**task)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done"), result
    evaluation = result["trajectory"]["metadata"]["evaluation"]
    assert (evaluation["outcome_reward"], evaluation["fail_to_pass"]) == (reward, solved), evaluation


@needs_bubblewrap
@pytest.mark.skipif("POLAR_TEST_MINI" not in os.environ, reason="POLAR_TEST_MINI names no `mini` of mini-swe-agent")
def test_mini_swe_agent_solves_it(engine: ScriptedEngine, chain: Chain, task: dict[str, Any]):
    mini = os.environ["POLAR_TEST_MINI"]
    asked = [Path(mini).parent / "python3", "-c", "import sys; print(sys.prefix, sys.base_prefix)"]
    prefixes = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    task["runtime"]["kwargs"]["bind"] = bound(sys.prefix, sys.base_prefix, *prefixes)
    task["agent"]["settings"]["command"] = mini
    for command in (RIGHT, "git diff", "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"):
        call = json.dumps({"name": "bash", "arguments": {"command": command}})
        engine.script({"text": f"<tool_call>\n{call}\n</tool_call>"})
    (result,) = chain.run(**task)
    assert result["metadata"]["termination"] == "done", result
    assert result["trajectory"]["metadata"]["evaluation"]["outcome_reward"] == 1.0
    assert result["trajectory"]["metadata"]["calls"]["continued"] == 2


def test_hidden_tests_are_not_in_what_the_agent_gets(task: dict[str, Any]):
    told = json.dumps({name: part for name, part in task.items() if name != "evaluator"})
    assert "test_three" not in told
    assert "mean([1, 2, 6]) is 4.5 {but} 3 is right" in task["instruction"]


def test_a_row_in_an_image_works_where_the_image_has_it(tmp_path: Path):
    (tmp_path / ID).mkdir()
    place = module("swegym_slime_grpo/prepare_data.py").place_of({"instance_id": ID}, tmp_path, None)
    assert (place["image"], place["workdir"], place["prepare"]) == (str(tmp_path / ID), "/testbed", [])
