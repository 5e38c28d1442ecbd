"""The examples' own parts, and the tasks that their files make of a row."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BATCH = ["--rollout-batch-size", "1", "--n-samples-per-prompt", "1", "--use-dynamic-batch-size"]
COLUMNS = ["--input-key", "prompt", "--label-key", "label", "--max-tokens-per-gpu", "4096"]


def module(path: str) -> Any:
    """A script of the examples, as a module."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, EXAMPLES / path)
    assert spec is not None
    assert spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = made
    spec.loader.exec_module(made)
    return made


def task_of(example: str, row: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What the bridge would submit for a group of one, by the example's YAML file."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text(json.dumps(row) + "\n")
    dry_run = module("dry_run.py")
    config = ["--custom-config-path", str(EXAMPLES / example / "polar.yaml"), "--prompt-data", str(prompts)]
    args = dry_run.arguments([*BATCH, *COLUMNS, *config])
    task, ignored = dry_run.first_task(args, dry_run.checked_config(args))
    assert ignored == []
    return task.model_dump(exclude_defaults=True)
