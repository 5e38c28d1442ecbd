"""Every flag that the examples and the documentation name exists: in this Slime's parser, in Polar's commands, or in
another program that is named here. Slime's parser is asked as it is built; of Megatron's and SGLang's flags, which
stand beside Slime's, those count that its own scripts and documentation use.
"""

from __future__ import annotations

import argparse
import os
import re
from pathlib import Path

from slime.backends.sglang_utils.arguments import add_sglang_arguments
from slime.utils.arguments import get_slime_extra_args_provider

ROOT = Path(__file__).parents[3]
CHECKOUT = Path(os.environ["POLAR_INSIDE_SLIME"])
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*[a-z0-9]")
OTHERS = {
    "git": {"--branch"},
    "pip": {"--no-deps"},
    "tar": {"--no-same-owner", "--exclude"},
    "uv": {"--managed-python", "--python"},
    "run.sh": {"--dry-run"},
    "a later Slime, to refuse it": {"--rollout-sample-hook-path"},
}


def texts() -> list[Path]:
    examples = ROOT / "examples"
    scripts = [*examples.rglob("*.sh"), *examples.rglob("README.md")]
    return [ROOT / "docs" / "slime.md", ROOT / "src" / "slime_bridge" / "README.md", *scripts]


def named(files: list[Path]) -> dict[str, str]:
    return {flag: path.name for path in files for flag in FLAG.findall(path.read_text())}


def slimes() -> set[str]:
    parser = argparse.ArgumentParser(conflict_handler="resolve")
    get_slime_extra_args_provider(None)(parser)
    add_sglang_arguments(parser)
    own = {word for action in parser._actions for word in action.option_strings}
    beside = [*(CHECKOUT / "scripts").rglob("*.sh"), *(CHECKOUT / "docs" / "en").rglob("*.md")]
    return own | set(named(beside))


def ours() -> set[str]:
    return set(named([*(ROOT / "src" / "polar" / "cli").glob("*.py"), *(ROOT / "examples").rglob("*.py")]))


def test_every_flag_exists():
    found = named(texts())
    known = slimes() | ours() | set().union(*OTHERS.values())
    assert len(found.keys() & slimes()) > 40
    assert {flag: where for flag, where in found.items() if flag not in known} == {}
