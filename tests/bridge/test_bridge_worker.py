"""The worker between calls, at its end and after a restart: nothing runs on, no prompt is lost, no wait has no end."""

from __future__ import annotations

import gc
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.bridge.conftest import Gateway, running
from tests.bridge.making import arguments
from tests.peers.node import Node, done
from tests.peers.relay import Relay
from tests.peers.trainer import Trainer
from tests.server.conftest import Server, eventually

from polar.errors import ConfigError
from polar.nodeapi import Lease
from polar.records import TaskState
from slime_bridge import rollout
from slime_bridge.groups import BridgeFault

Make = Callable[..., Trainer]
SLOW = 4.0
"""Seconds in which a scripted session ends on a busy machine too."""


def only_first(count: int) -> Callable[[Lease, Node], Any]:
    """Sessions of the first `count` prompts end; the others run for ever."""

    def script(lease: Lease, node: Node) -> Any:
        return done(lease, node) if int(lease.task["instruction"][1:]) < count else None

    return script


def test_the_last_rollout_starts_nothing_ahead(server: Server, gateway: Gateway, make_trainer: Make):
    trainer = make_trainer(polar_prefetch=True, num_rollout=2)
    first = trainer.rollout(0)
    second = trainer.rollout(1)
    assert running(server) == []
    assert len({*first.groups, *second.groups}) == 4
    assert second.metrics["polar/scheduler/active_groups"] == 0


def test_the_args_of_a_call_are_its_own(server: Server, gateway: Gateway, make_trainer: Make, tmp_path):
    """Slime sends a copy with each: the first one's are not kept."""
    trainer = make_trainer()
    trainer.rollout(0)
    path = tmp_path / "eval.jsonl"
    path.write_text('{"input": "e0"}\n')
    trainer.args = arguments(**(vars(trainer.args) | {"eval_prompt_data": ["later", str(path)]}))
    assert trainer.evaluate(0).data["later"]["rewards"] == [1.0]


def test_stragglers_without_end_blow_the_fuse_too(server: Server, gateway: Gateway, make_trainer: Make):
    gateway.script = only_first(0)
    trainer = make_trainer(polar_straggler_deadline=0.2, polar_max_consecutive_drops=4)
    with pytest.raises(BridgeFault, match=r"4 groups dropped in a row.*straggler: still running after 0.2 s"):
        trainer.rollout(0)
    rollout.close()
    eventually(lambda: running(server) == [])


def test_a_straggler_that_ends_after_all_is_surplus_for_the_next_call(
    server: Server, gateway: Gateway, make_trainer: Make
):
    gateway.script = lambda lease, node: None if lease.task["instruction"] == "p1" else done(lease, node)
    trainer = make_trainer(polar_straggler_deadline=SLOW, polar_prefetch=True, polar_max_async_level=1)
    first = trainer.rollout(0)
    assert 1 not in first.groups
    gateway.finish("p1")
    eventually(lambda: len(running(server)) == 0, 60)
    second = trainer.rollout(1)
    assert second.groups[0] == 1
    assert first.metrics["polar/replaced_stragglers"] >= 1
    assert second.metrics["polar/dropped_groups"] == 0
    assert second.metrics["polar/ledger/balanced"] == 1


def test_a_debugging_run_without_training_has_no_stale_groups(server: Server, gateway: Gateway, make_trainer: Make):
    """Nothing is ever newer than the weights that the engine began with."""
    trainer = make_trainer(polar_prefetch=True, debug_rollout_only=True)
    trainer.rollout(0)
    eventually(lambda: not running(server))
    assert trainer.rollout(50).metrics["polar/dropped_stale_groups"] == 0


def test_a_call_that_waits_is_told_that_the_worker_is_closed(server: Server, gateway: Gateway, make_trainer: Make):
    gateway.script = only_first(0)
    trainer, told = make_trainer(), []

    def call() -> None:
        with pytest.raises(BridgeFault) as error:
            trainer.rollout(0)
        told.append(str(error.value))

    waiting = threading.Thread(target=call)
    waiting.start()
    eventually(lambda: len(gateway.tasks()) == 2)
    rollout.close()
    waiting.join(20)
    assert told == ["the bridge's worker is closed"]
    eventually(lambda: running(server) == [])
    gateway.script = done
    assert trainer.rollout(0).groups == [0, 1], "what was under way is given out again"


@pytest.mark.parametrize("path", [pytest.param("train", marks=pytest.mark.slow), "eval"])
def test_a_trainer_that_is_interrupted_cancels_its_tasks(
    server: Server, gateway: Gateway, make_trainer: Make, tmp_path, path: str
):
    """Also where the server has a name, which an interpreter that ends cannot look up in a thread any more."""
    gateway.script = lambda lease, node: None
    items = tmp_path / "eval.jsonl"
    items.write_text('{"input": "e0"}\n{"input": "e1"}\n')
    settings = {
        "polar_rollout_url": server.url.replace("127.0.0.1", "localhost"),
        "prompt_data": make_trainer().args.prompt_data,
        "eval_prompt_data": ["held_out", str(items)],
        "save": None,
        "load": None,
    }
    command = [sys.executable, "-m", "tests.bridge.dying_trainer", json.dumps(settings), path]
    trainer = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    try:
        eventually(lambda: len(gateway.tasks()) == 2, 150)
        trainer.send_signal(signal.SIGINT)
        _, told = trainer.communicate(timeout=60)
    finally:
        trainer.kill()
    assert "KeyboardInterrupt" in told
    assert trainer.returncode != 0
    names = [task["task_id"] for task in gateway.tasks()]
    eventually(lambda: {server.task(name)["status"] for name in names} == {TaskState.CANCELLED.value})


def test_nothing_is_lost_or_repeated_over_a_restart(server: Server, gateway: Gateway, make_trainer: Make, tmp_path):
    """Killed at its worst: rollout 1 was generated, more was in flight, and the checkpoint is of rollout 0."""
    kept = {"save": str(tmp_path), "load": str(tmp_path), "polar_prefetch": True}
    first = make_trainer(**kept)
    trained = first.rollout(0).groups
    first.rollout(1)
    first.save(0)
    rollout.close()
    second = Trainer(arguments(**(vars(first.args) | kept)), after=0)
    assert second.data_source.resumed_groups >= 2
    steps = [second.rollout(number) for number in range(1, 5)]
    assert steps[0].metrics["polar/scheduler/resumed_groups"] == second.data_source.resumed_groups
    seen = [*trained, *(group for step in steps for group in step.groups)]
    assert len(seen) == len(set(seen)) == 10
    second.save(4)
    rollout.close()
    third = Trainer(arguments(**(vars(first.args) | kept)), after=4)
    rest = [group[0].group_index for group in third.data_source.get_samples(10)]
    assert sorted([*seen, *rest]) == list(range(20))


def test_what_replaced_a_straggler_and_was_not_needed_is_saved_once(
    server: Server, gateway: Gateway, make_trainer: Make, tmp_path
):
    def script(lease: Lease, node: Node) -> Any:
        name = lease.task["instruction"]
        if name == "p2":
            gateway.finish("p1")
        return None if name in ("p1", "p2") else done(lease, node)

    gateway.script = script
    kept = {"save": str(tmp_path), "load": str(tmp_path)}
    trainer = make_trainer(polar_straggler_deadline=SLOW, **kept)
    assert trainer.rollout(0).groups == [0, 1]
    trainer.save(0)
    again = Trainer(arguments(**(vars(trainer.args) | kept)), after=0)
    assert [group[0].group_index for group in again.data_source.get_samples(3)] == [2, 3, 4]


def test_engines_that_do_not_fall_idle_are_an_error_that_names_the_key(gateway: Gateway, make_trainer: Make):
    """The scripted gateway acknowledges no order."""
    trainer = make_trainer(colocate=True, polar_weight_update_pause_timeout=0.5)
    with pytest.raises(
        ConfigError, match=r"polar_weight_update_pause_timeout: .* not idle after 0.5 s .*set it higher"
    ):
        trainer.rollout(0)


def test_an_answer_that_will_never_be_another_ends_the_rollout(gateway: Gateway, make_trainer: Make, relay: Relay):
    """The token is taken back while tasks run, and their callbacks go astray."""
    trainer = make_trainer(polar_rollout_url=relay.url)
    relay.rewrite = lambda body: body if b"polar-probe" in body else body.replace(b"/callback/task_result", b"/nowhere")
    relay.answer_instead = lambda path: 401 if path.startswith("/rollout/task/polar-slime") else None
    with pytest.raises(BridgeFault, match="401"):
        trainer.rollout(0)


def test_an_invalid_callback_costs_nothing_but_the_time_of_a_poll(gateway: Gateway, make_trainer: Make):
    def script(lease: Lease, node: Node) -> Any:
        url = lease.task["callback_url"]
        for body in (b"", b"{", b'{"task_id": "x", "status": "completed", "results": [{}]}'):
            assert httpx.post(url, content=body).json()["ok"] is False
        return done(lease, node)

    gateway.script = script
    step = make_trainer().rollout(0)
    assert step.groups == [0, 1]
    assert step.metrics["polar/dropped_groups"] == 0


class Broken(list):
    """A group whose second use fails: when its result comes."""

    def __iter__(self) -> Any:
        raise ZeroDivisionError("a fault of the bridge's own")


@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.filterwarnings("error::RuntimeWarning")
def test_a_fault_behind_the_scenes_reaches_the_trainer_as_itself(
    gateway: Gateway, make_trainer: Make, caplog: pytest.LogCaptureFixture, prefetch: bool
):
    """And again at each later call; nothing is started on what is ending."""
    trainer = make_trainer(polar_prefetch=prefetch, rollout_batch_size=4)
    take = trainer.data_source.take
    trainer.data_source.take = lambda count: [Broken(group) for group in take(count)]
    for number in range(3):
        with pytest.raises(ZeroDivisionError, match="a fault of the bridge's own"):
            trainer.rollout(number)
    with pytest.raises(ZeroDivisionError, match="a fault of the bridge's own"):
        trainer.evaluate(0)
    gc.collect()
    assert "never awaited" not in caplog.text
    assert "was destroyed" not in caplog.text
