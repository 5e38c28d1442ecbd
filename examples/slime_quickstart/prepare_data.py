"""Tasks of reasoning-gym as Slime's prompt data: train.jsonl and eval.jsonl, without a question in common.

    pip install reasoning-gym && python prepare_data.py --out data

Rewards compare the answer with the one right answer, so a task of which several answers are right is refused.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import reasoning_gym
from reasoning_gym.dataset import ProceduralDataset

TASKS = ("basic_arithmetic", "gcd", "lcm", "leg_counting", "letter_counting", "simple_equations")
BLOCK = 500
"""questions that are made at once"""


def rows(task: str, seed: int) -> Iterator[dict[str, Any]]:
    """Endlessly. Raises SystemExit for a task that has no one right answer."""
    for block in count():
        data = reasoning_gym.create_dataset(task, size=BLOCK, seed=seed + block)
        if type(data).score_answer is not ProceduralDataset.score_answer:
            raise SystemExit(f"{task} accepts several answers (it has a scorer of its own), and this example only one")
        for entry in data:
            yield {"prompt": entry["question"], "label": entry["answer"], "metadata": {"task": task}}


def sets(tasks: list[str], sizes: dict[str, int], seed: int) -> dict[str, list[dict[str, Any]]]:
    """Each set has its size, task by task in turn; a question comes once."""
    sources = [rows(task, seed) for task in tasks]
    used: set[str] = set()
    return {name: [_new(sources[at % len(sources)], used) for at in range(size)] for name, size in sizes.items()}


def _new(source: Iterator[dict[str, Any]], used: set[str]) -> dict[str, Any]:
    for repeats, row in enumerate(source):
        if row["prompt"] not in used:
            used.add(row["prompt"])
            return row
        if repeats > 20 * BLOCK:
            raise SystemExit(f"{row['metadata']['task']} has too few questions: ask for less, or leave it out")
    raise AssertionError("the source is endless")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--train", type=int, default=4096)
    parser.add_argument("--eval", type=int, default=120)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tasks", nargs="+", default=TASKS)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    made = sets(options.tasks, {"eval": options.eval, "train": options.train}, options.seed)
    for name, found in made.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
        print(f"{path}: {len(found)} prompts of {', '.join(options.tasks)}")


if __name__ == "__main__":
    main()
