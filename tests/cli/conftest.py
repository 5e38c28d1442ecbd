from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from chain import Chain, polar_serve, until
from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer
from polar.cli.main import make_app

SECONDS = 60


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def chain(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with polar_serve(tmp_path_factory.mktemp("polar") / "data", engine.url, "--run-workers=4") as made:
        yield made


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "polar", *map(str, words)]


def environment(**variables: str) -> dict[str, str]:
    """The terminal of a program: wide, without colours, and none of our variables but those given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("POLAR_")}
    return clean | {"COLUMNS": "200", "NO_COLOR": "1"} | variables


def polar(*words: str, cwd: Path | None = None, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end. It may start nothing that outlives it."""
    return subprocess.run(
        command(*words), capture_output=True, text=True, timeout=SECONDS, cwd=cwd, env=environment(**variables)
    )


def inside(*words: object, **variables: str) -> Any:
    """The command in this process."""
    return CliRunner().invoke(make_app(), list(map(str, words)), env={"COLUMNS": "200", "NO_COLOR": "1"} | variables)


def at(chain: Chain, *words: object) -> Any:
    return inside(*words, POLAR_SERVER_URL=chain.url)


def task_file(path: Path, *tasks: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps({"instruction": "do it"} | task) + "\n" for task in tasks))
    return path


def marked(text: str) -> list[int]:
    """Processes whose command line or environment has `text` in it."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            said = (entry / "cmdline").read_bytes() + (entry / "environ").read_bytes()
        except OSError:
            continue
        if text.encode() in said:
            found.append(int(entry.name))
    return found


def gone(text: str, seconds: float = 15.0) -> None:
    until(lambda: not marked(text), seconds)
