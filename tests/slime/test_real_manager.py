"""Slime's real RolloutManager under Ray, from prompts to the data of each rank, on every version: what the trainer gets
is what the engine said, weighed once a trajectory, and a run that goes on from a checkpoint loses no prompt.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.slime.checkouts import needs_slime, on_every_checkout, run_on
from tests.slime.truth import Engine, Row, check_advantages, check_weights, rows_of
from tests.slime.world import BATCH, HARD, PROMPTS, SESSIONS, World, a_world

ORDER = {"first/0": (0, 1, 2, 3), "first/1": (4, 5, 6, 7), "first/2": (8, 9, 0, 1)}
ORDER |= {"second/2": (8, 9, 0, 1), "second/3": (0, 1, 2, 3)}
"""Prompts by rollout: an epoch of 10 is rounded up to 12."""


@needs_slime
@on_every_checkout
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_trainer_gets_what_the_engine_said(checkout: Path, tmp_path: Path):
    with a_world(tmp_path) as world:
        told = drive(checkout, world)
        engine = Engine(world)
        tokens = {name: check_rollout(world, engine, rows_of(told[name]), prompts) for name, prompts in ORDER.items()}
        assert engine.generations == sum(calls(prompts) for prompts in ORDER.values()) + 2 * (2 + 3)
        assert world.left() == []
    check_resumed(told)
    check_log(told["log"], list(tokens.values()))
    for rollout in range(3):
        assert {each for versions in told[f"versions/{rollout}"] for each in versions} == {str(rollout + 1)}


def drive(checkout: Path, world: World) -> dict[str, Any]:
    out = world.folder / "told.json"
    words = [
        "-m",
        "tests.slime.inside.drive_manager",
        str(out),
        world.engine.url,
        *world.flags(save=world.folder / "save"),
    ]
    run_on(checkout, *words, seconds=800, TENSORBOARD_DIR=str(world.folder / "tensorboard"))
    return json.loads(out.read_text())


def calls(prompts: tuple[int, ...]) -> int:
    """Two a session, one more for the helper of session 1, none for one that gave up."""
    return sum(SESSIONS * 2 + 1 - 2 * (prompt in HARD) for prompt in prompts)


def check_rollout(world: World, engine: Engine, rows: list[Row], prompts: tuple[int, ...]) -> int:
    """How many of its tokens are trained."""
    given_up = sum(prompt in HARD for prompt in prompts)
    assert len(rows) == BATCH * (SESSIONS + 1)
    assert sum(row.mask == [0] for row in rows) == given_up
    asked = [world.decode(rows[at].prompt) for at in range(0, len(rows), SESSIONS + 1)]
    assert [f"task {prompt}" in text for prompt, text in zip(prompts, asked, strict=True)] == [True] * BATCH
    check_weights(rows)
    check_advantages(rows)
    trained = sum(engine.trained(row) for row in rows)
    for row in rows:
        if any(row.mask) and "You help" not in world.decode(row.prompt):
            assert row.reward == engine.last_number(row) % 2
    return trained


def check_resumed(told: dict[str, Any]) -> None:
    """The rollout that was generated and not saved comes again, sample by sample."""
    again = [[row.index for row in rows_of(told[name])] for name in ("first/2", "second/2", "second/3")]
    assert again[0] == again[1]
    assert min(again[2]) == max(again[1]) + 1 == PROMPTS // BATCH * BATCH * SESSIONS + BATCH * SESSIONS


def check_log(log: dict[str, list[tuple[int, float]]], trained: list[int]) -> None:
    def values(tag: str) -> list[float]:
        return [value for _, value in log[tag]]

    assert [step for step, _ in log["polar/ledger/balanced"]] == [0, 1, 2, 2, 3]
    assert values("polar/ledger/balanced") == [1.0] * 5
    assert values("polar/completed_groups") == [BATCH] * 5
    assert values("polar/tokens/trained") == values("polar/tokens/sampled") == trained
    assert values("polar/ledger/tokens/trained") == [*accumulated(trained[:3]), *accumulated(trained[3:])]
    assert values("polar/staleness/mean") == [0.0] * 4 + [1.0]
    assert values("polar/staleness/unknown_versions") == [0.0] * 5
    assert values("polar/dropped_sessions") == [sum(prompt in HARD for prompt in prompts) for prompts in ORDER.values()]
    assert values("polar/calls/drift") == [0.0] * 5
    assert values("polar/scheduler/resumed_groups") == [0, 0, 0, BATCH, BATCH]
    assert values("eval/held_out") == values("polar/eval/held_out/reward_mean")
    assert values("polar/eval/held_out/sessions") == [4]
    assert len(values("rollout/response_len/mean")) == 5


def accumulated(counts: list[int]) -> list[int]:
    return [sum(counts[: at + 1]) for at in range(len(counts))]
