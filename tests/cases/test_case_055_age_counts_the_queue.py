"""Case 55: a group's age is the rollout that trains it minus that of its oldest token's policy, however long it waited;
one that is over the bound is dropped whole. After a restart no more is in flight than the bound allows at any time."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from tests.bridge.conftest import Gateway, gateway, house, make_trainer, server
from tests.bridge.test_bridge_rollout import running
from tests.peers.trainer import Trainer
from tests.server.conftest import Server, eventually

from polar.errors import PolarError
from slime_bridge import rollout

__all__ = ["gateway", "house", "make_trainer", "server"]
LEVEL, BATCH = 7, 2
BOUND = LEVEL + 1
"""polar_max_async_level + update_weights_interval"""


@pytest.mark.parametrize("waited", [BOUND, BOUND + 1])
def test_a_group_that_was_done_at_5_is_trained_at_13_and_dropped_at_14(
    server: Server, gateway: Gateway, make_trainer: Callable[..., Trainer], waited: int
) -> None:
    trainer = make_trainer(polar_prefetch=True, polar_max_async_level=LEVEL)
    first = trainer.rollout(5)
    eventually(lambda: not running(server), 60)
    late = trainer.rollout(5 + waited)
    left = [number for number in range(LEVEL * BATCH + BATCH) if number not in first.groups]
    if waited <= BOUND:
        assert late.groups == left[:BATCH]
        assert late.metrics["polar/staleness/max"] == BOUND
    else:
        assert late.metrics["polar/dropped_stale_groups"] == len(left)
        assert not set(late.groups) & set(left)
        assert late.metrics["polar/staleness/max"] == 0
    assert late.metrics["polar/ledger/balanced"] == 1


def test_after_a_restart_at_500_no_more_is_in_flight_than_ever(
    server: Server, gateway: Gateway, make_trainer: Callable[..., Trainer]
) -> None:
    gateway.script = lambda lease, node: None
    trainer = make_trainer(polar_prefetch=True, polar_max_async_level=LEVEL)

    def call() -> None:
        with pytest.raises(PolarError, match="closed"):
            trainer.rollout(500)

    waiting = threading.Thread(target=call)
    waiting.start()
    eventually(lambda: len(running(server)) == LEVEL * BATCH, 60)
    first = eventually(lambda: begun(gateway) and begun(gateway)[0])
    eventually(lambda: begun(gateway).count(first) == 2, 60)
    gateway.finish(first)
    eventually(lambda: len(running(server)) == LEVEL * BATCH - 1, 60)
    known = [name for name in server.http.get("/rollout/status").json()["tasks"] if "-slime-500-" in name]
    assert len(known) == LEVEL * BATCH, "an accepted group is owned until it is trained"
    rollout.close()
    waiting.join(30)


def begun(gateway: Gateway) -> list[str]:
    """The prompts of this run's sessions so far."""
    return [lease.task["instruction"] for lease in gateway.leases if "-slime-500-" in lease.task["task_id"]]
