"""Slime's own training loop, unchanged, in a small Ray: `python -m tests.slime.inside.drive_loop OUT LOOP FLAGS…`.

OUT gets the samples of each rollout as Slime kept them for debugging, and what it logged.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from tests.slime.inside.logged import logged
from tests.slime.inside.under_ray import small_ray


def samples(folder: Path) -> dict[str, list[dict[str, Any]]]:
    return {
        file.stem.removeprefix("debug_"): torch.load(file, weights_only=False)["samples"]
        for file in sorted(folder.glob("debug_*.pt"))
    }


def main(out: Path, loop: Path) -> None:
    with small_ray():
        runpy.run_path(str(loop), run_name="__main__")
    out.write_text(json.dumps({"log": logged(os.environ["TENSORBOARD_DIR"]), "samples": samples(out.parent / "save")}))


if __name__ == "__main__":
    where, what = sys.argv[1:3]
    del sys.argv[1:3]
    sys.argv[0] = what
    main(Path(where), Path(what))
