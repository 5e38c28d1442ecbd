"""Slime's own train.py and train_async.py with --debug-rollout-only: order, evaluation, saved states and the bridge's
books, with and without prefetch. (Newer loops than v0.3.1's need an accelerator.)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.chain import until
from tests.slime.checkouts import needs_slime, on_every_checkout, run_on
from tests.slime.truth import Engine, Row
from tests.slime.world import BATCH, SESSIONS, World, a_world

ROLLOUTS = 5


@needs_slime
@pytest.mark.parametrize("prefetch", [False, True], ids=["on demand", "prefetch"])
@pytest.mark.parametrize("loop", ["train.py", "train_async.py"])
@on_every_checkout
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_whole_run(checkout: Path, loop: str, prefetch: bool, tmp_path: Path):
    if (checkout / "slime" / "utils" / "accelerator").exists():
        pytest.skip("the loops of this version need an accelerator")
    with a_world(tmp_path) as world:
        told = drive(checkout / loop, world, prefetch)
        rollouts = [told["samples"][str(rollout)] for rollout in range(ROLLOUTS)]
        engine = Engine(world)
        trained = [sum(engine.trained(_row(sample)) for sample in samples) for samples in rollouts]
        check_log(told["log"], trained)
        evaluated = [step for step, _ in told["log"]["eval/held_out"]]
        assert evaluated == ([0, 1, 3] if loop == "train.py" else [1, 3])
        check_states(tmp_path / "save", rollouts, prefetch)
        until(lambda: world.left() == [], 60)


def drive(loop: Path, world: World, prefetch: bool) -> dict[str, Any]:
    out = world.folder / "told.json"
    flags = world.flags(
        save=world.folder / "save",
        debug_rollout_only=None,
        num_rollout=ROLLOUTS,
        save_interval=1,
        eval_interval=2,
        polar={"polar_prefetch": prefetch},
    )
    words = ["-m", "tests.slime.inside.drive_loop", str(out), str(loop), *flags]
    run_on(loop.parent, *words, seconds=800, TENSORBOARD_DIR=str(world.folder / "tensorboard"))
    return json.loads(out.read_text())


def _row(sample: dict[str, Any]) -> Row:
    group = sample.get("group_id", sample.get("rollout_id"))
    reward, mask = sample["reward"], sample["loss_mask"]
    mask = [0] * len(mask) if sample["remove_sample"] else mask
    return Row(sample["index"], group, sample["tokens"], mask, sample["rollout_log_probs"], reward, 0.0, 0.0)


def check_log(log: dict[str, list[tuple[int, float]]], trained: list[int]) -> None:
    def values(tag: str) -> list[float]:
        return [value for _, value in log[tag]]

    assert [step for step, _ in log["polar/completed_groups"]] == list(range(ROLLOUTS))
    assert values("polar/completed_groups") == [BATCH] * ROLLOUTS
    assert values("polar/tokens/trained") == trained
    assert values("polar/ledger/balanced") == [1.0] * ROLLOUTS
    assert values("polar/dropped_groups") == [0.0] * ROLLOUTS


def check_states(save: Path, rollouts: list[list[dict[str, Any]]], prefetch: bool) -> None:
    """After each rollout: what was handed out is trained by then or stands in the state, once."""
    done: set[int] = set()
    for number, samples in enumerate(rollouts):
        assert len({sample["index"] for sample in samples}) == BATCH * SESSIONS
        done |= {sample["group_index"] for sample in samples}
        state = json.loads((save / "rollout" / f"polar_data_source_{number}.json").read_text())
        waiting = [group[0]["group_index"] for group in state["buffer"]]
        assert len(waiting) == len(set(waiting))
        assert done.isdisjoint(waiting)
        assert done | set(waiting) == set(range(state["sample_group_index"]))
    assert len(done) == BATCH * ROLLOUTS
    if not prefetch:
        assert done == set(range(BATCH * ROLLOUTS))
