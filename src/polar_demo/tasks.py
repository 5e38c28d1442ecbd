"""The demo's tasks: find a value in one of thirty files.

A task is a function of its seed. All files hold the same keys, so only who reads the file that was asked for, and
copies the line that was asked for, is right; nothing but the tool's answer tells the value.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from polar_demo.vocabulary import FILES, KEYS, VALUES

FILES_IN_FOLDER, LINES_IN_FILE = 30, 5


@dataclass(frozen=True)
class LookUp:
    """One task: the instruction, the files in the sandbox (name to text), and the one right answer, word for word."""

    seed: int
    file: str
    key: str
    value: str
    files: dict[str, str]

    @property
    def instruction(self) -> str:
        return f"in {self.file} what is {self.key} ?"

    @property
    def command(self) -> str:
        return f"read {self.file}"

    @property
    def answer(self) -> str:
        return f"{self.key} = {self.value}"


def look_up(seed: int) -> LookUp:
    """The task of this seed, the same on every machine."""
    rng = random.Random(seed)
    names, keys = rng.sample(FILES, FILES_IN_FOLDER), rng.sample(KEYS, LINES_IN_FILE)
    tables = {
        name: dict(zip(rng.sample(keys, len(keys)), rng.sample(VALUES, len(keys)), strict=True)) for name in names
    }
    file, key = rng.choice(names), rng.choice(keys)
    return LookUp(seed, file, key, tables[file][key], {name: _as_text(table) for name, table in tables.items()})


def files_for(seed: int) -> dict[str, str]:
    """The folder of the task of this seed: name to text."""
    return look_up(seed).files


def tool_result(files: dict[str, str], said: str) -> str:
    """What the harness's tool answers to the policy's first turn."""
    words = said.split()
    if len(words) != 2 or words[0] != "read" or words[1] not in files:
        return "error : no such file"
    return files[words[1]]


def _as_text(table: dict[str, str]) -> str:
    return "".join(f"{key} = {value} ;\n" for key, value in table.items())
