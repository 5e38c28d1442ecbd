"""Each fault that is known of such bridges has its test, and the tests that the docs name are there."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from tests.bridge.conftest import Gateway
from tests.peers.trainer import Trainer
from tests.server.conftest import Server

TESTS = Path(__file__).parents[1]
DOCS = TESTS.parent / "docs" / "slime-faults.md"
ROWS = 30


def test_every_fault_names_tests_that_exist():
    rows = [line for line in DOCS.read_text().splitlines() if re.match(r"\| \d+ \|", line)]
    assert [int(row.split("|")[1]) for row in rows] == list(range(1, ROWS + 1))
    for row in rows:
        named = re.findall(r"`([\w/]+\.py)(?:::(\w+))?`", row)
        assert named, row
        for file, function in named:
            assert f"def {function or 'test_'}" in (TESTS / file).read_text(), (file, function)


def test_connections_that_were_closed_between_two_rollouts_cost_nothing(
    server: Server, gateway: Gateway, make_trainer: Callable[..., Trainer]
):
    trainer = make_trainer()
    trainer.rollout(0)
    server.restart()
    step = trainer.rollout(1)
    assert [group[0][0].group_index for group in step.nest] == [2, 3]
    assert step.metrics["polar/dropped_groups"] == 0


def test_another_configuration_in_the_same_process_begins_anew(gateway: Gateway, make_trainer: Callable[..., Trainer]):
    trainer = make_trainer()
    assert trainer.rollout(0).metrics["polar/ledger/groups/arrived"] == 2
    trainer.args.rollout_temperature = 0.5
    assert trainer.rollout(1).metrics["polar/ledger/groups/arrived"] == 2, "its books are new"
    temperatures = [task["sampling"]["temperature"] for task in gateway.tasks()]
    assert temperatures == [1.0, 1.0, 0.5, 0.5]
