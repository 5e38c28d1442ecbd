"""SWE-Gym's rows as Slime's prompt data: what the agent is told, where it works, and what its work is graded by.

    python prepare_data.py --rows swegym.parquet --images /data/swegym-images --out data

A row has the columns instance_id, repo, base_commit, problem_statement, test_patch, FAIL_TO_PASS and PASS_TO_PASS
(lists, or their JSON). It works in the root file system IMAGES/instance_id (images.sh makes them), whose repository
is /testbed; or, with --checkouts, in a copy of the git checkout CHECKOUTS/instance_id and with the host's programs.
Rows without either are left out, and counted.
"""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

INSTRUCTION = """\
In the current folder is a checkout of {repo}. Solve the issue below by changing its source code.
Find the cause, change what has to change, and try it out. Do not change tests: hidden ones will be run.
When you are done, leave your changes in the working tree.

<issue>
{problem_statement}
</issue>
"""
IMAGE_ENVIRONMENT = {
    "PATH": "/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:/usr/local/bin:/usr/bin:/bin",
    "CONDA_PREFIX": "/opt/miniconda3/envs/testbed",
    "CONDA_DEFAULT_ENV": "testbed",
}
TEST_COMMAND = "python -m pytest -rA --color=no --tb=no"


def read_rows(path: Path) -> Iterator[dict[str, Any]]:
    """Of a .parquet or .jsonl file."""
    if path.suffix == ".parquet":
        import pyarrow.parquet

        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    else:
        yield from (json.loads(line) for line in path.read_text().splitlines() if line.strip())


def names(value: Any) -> list[str]:
    """The tests of a column: a list, or one as JSON."""
    return list(json.loads(value) if isinstance(value, str) else value)


def tests_of(row: dict[str, Any], command: str) -> dict[str, Any]:
    """The evaluator's config. The files run are those of the tests that count."""
    fail_to_pass, pass_to_pass = names(row["FAIL_TO_PASS"]), names(row["PASS_TO_PASS"])
    files = sorted({name.split("::")[0] for name in fail_to_pass + pass_to_pass})
    return {
        "base_commit": row["base_commit"],
        "test_patch": row["test_patch"],
        "test_command": f"{command} {shlex.join(files)}",
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
    }


def place_of(row: dict[str, Any], images: Path | None, checkouts: Path | None) -> dict[str, Any] | None:
    """The parts of the task's runtime that differ from row to row; None where there is nothing to work in."""
    folder = ((images or checkouts or Path()) / row["instance_id"]).absolute()
    if not folder.is_dir():
        return None
    if images is not None:
        return {"image": str(folder), "workdir": "/testbed", "prepare": [], "env": IMAGE_ENVIRONMENT}
    copied = {"type": "upload_dir", "source": str(folder), "target": "/workspace"}
    at_base = {"type": "exec", "command": f"git checkout -q --force {row['base_commit']}", "cwd": "/workspace"}
    return {"image": "", "workdir": "/workspace", "prepare": [copied, at_base], "env": {}}


def prompt_data(row: dict[str, Any], place: dict[str, Any], command: str) -> dict[str, Any]:
    metadata = {"repo": row["repo"], **place, "tests": tests_of(row, command)}
    return {"prompt": INSTRUCTION.format(**row), "label": row["instance_id"], "metadata": metadata}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="the dataset's .parquet or .jsonl")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--images", type=Path, help="folder of root file systems, one an instance_id")
    where.add_argument("--checkouts", type=Path, help="folder of git checkouts, one an instance_id")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "data")
    parser.add_argument("--eval", type=int, default=32, help="rows kept for evaluation, from the end")
    parser.add_argument("--limit", type=int, help="rows at most")
    parser.add_argument("--test-command", default=TEST_COMMAND, help="the files with tests come behind it")
    options = parser.parse_args()
    rows = list(read_rows(options.rows))[: options.limit]
    placed = [(row, place_of(row, options.images, options.checkouts)) for row in rows]
    made = [prompt_data(row, place, options.test_command) for row, place in placed if place is not None]
    if len(made) <= options.eval:
        raise SystemExit(f"{len(made)} of {len(rows)} rows have a place to work in, and --eval takes {options.eval}")
    at = len(made) - options.eval
    options.out.mkdir(parents=True, exist_ok=True)
    for name, found in {"train": made[:at], "eval": made[at:]}.items():
        path = options.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
        print(f"{path}: {len(found)} tasks")
    print(f"left out: {len(rows) - len(made)} rows without an image or checkout")


if __name__ == "__main__":
    main()
