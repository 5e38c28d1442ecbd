"""The hooks against a real rollout server: exact batches, dropped groups replaced, nothing left running."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import numpy as np
import pytest
from tests.bridge.conftest import Gateway, running
from tests.peers.node import Node, done, fault
from tests.peers.relay import Relay
from tests.peers.trainer import Trainer
from tests.server.conftest import Server, eventually

from polar.nodeapi import Lease
from polar.records import Drop
from slime_bridge import rollout
from slime_bridge.groups import BridgeFault
from slime_bridge.reward import reward_func
from slime_bridge.slime_types import trajectory_of

Make = Callable[..., Trainer]


def task_of(lease: Lease) -> dict:
    return lease.task


def without_logprobs(lease: Lease, node: Node):
    result = done(lease, node)
    result.traces[0].response_logprobs = None
    return result


def untrainable(lease: Lease, node: Node):
    result = done(lease, node)
    result.traces[0].loss_mask = np.zeros(3, np.uint8)
    return result


def test_a_rollout_is_exactly_a_batch_three_lists_deep(gateway: Gateway, make_trainer: Make):
    gateway.script = lambda lease, node: done(lease, node, reward=float(lease.session_index))
    trainer = make_trainer()
    first, second = trainer.rollout(0), trainer.rollout(1)
    for number, step in enumerate((first, second)):
        assert [[len(traces) for traces in group] for group in step.nest] == [[1, 1], [1, 1]]
        assert [trajectory_of(sample) for sample in step.samples] == list(range(4 * number, 4 * number + 4))
        assert step.raw == [0.0, 1.0, 0.0, 1.0]
        assert step.rewards == pytest.approx([-1.414, 1.414, -1.414, 1.414], abs=1e-3)
        assert step.metrics["polar/completed_groups"] == 2
        assert step.metrics["polar/reward_mean"] == 0.5
        assert step.metrics["polar/ledger/balanced"] == 1
        assert step.metrics["polar/tokens/sampled"] == step.metrics["polar/tokens/trained"] == 12
    assert second.metrics["polar/ledger/tokens/trained"] == 24
    made = min(gateway.tasks(), key=lambda task: task["metadata"]["group_id"])
    assert (made["instruction"], made["num_samples"]) == ("p0", 2)
    assert made["sampling"]["temperature"] == 1.0
    assert made["sampling"]["max_tokens"] == 16
    assert made["callback_format"] == "msgpack"
    assert made["task_id"].startswith("polar-slime-0-0-")
    assert made["metadata"]["group_id"] == 0
    assert (made["metadata"]["rollout_step"], made["metadata"]["policy_version"]) == (0, None)


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (fault, Drop.FAILED),
        (without_logprobs, Drop.LOGPROB_ERROR),
        (untrainable, Drop.ZERO_TRAINABLE),
    ],
)
def test_a_bad_group_is_dropped_under_its_name_and_replaced(gateway: Gateway, make_trainer: Make, play, reason: Drop):
    def script(lease: Lease, node: Node):
        return play(lease, node) if task_of(lease)["instruction"] == "p1" else done(lease, node)

    gateway.script = script
    step = make_trainer().rollout(0)
    assert [group[0][0].group_index for group in step.nest] == [0, 2]
    assert step.metrics[f"polar/dropped_{reason.value}_groups"] == 1
    assert step.metrics["polar/dropped_groups"] == 1
    assert step.metrics["polar/ledger/balanced"] == 1
    assert step.metrics["polar/ledger/groups/arrived"] == 3


def test_half_a_group_is_kept_or_dropped_as_the_fraction_says(gateway: Gateway, make_trainer: Make):
    def script(lease: Lease, node: Node):
        first = task_of(lease)["instruction"] == "p0"
        return fault(lease, node, retryable=False) if first and lease.session_index == 1 else done(lease, node)

    gateway.script = script
    step = make_trainer().rollout(0)
    (kept,), (lost,) = step.nest[0]
    assert (kept.status.value, lost.status.value, lost.remove_sample) == ("completed", "failed", True)
    assert step.metrics["polar/dropped_sessions"] == 1
    step = make_trainer(polar_min_complete_accept_fraction=1.0).rollout(0)
    assert [group[0][0].group_index for group in step.nest] == [1, 2]
    assert step.metrics["polar/dropped_low_complete_fraction_groups"] == 1


def test_only_bad_groups_blow_the_fuse_with_the_reasons(gateway: Gateway, make_trainer: Make):
    gateway.script = without_logprobs
    with pytest.raises(BridgeFault, match=r"3 groups dropped in a row.*: 3 × logprob_error: 3 trainable tokens"):
        make_trainer(polar_max_consecutive_drops=3).rollout(0)


def test_a_straggler_is_replaced_and_nothing_of_it_runs_on(server: Server, gateway: Gateway, make_trainer: Make):
    gateway.script = lambda lease, node: None if task_of(lease)["instruction"] == "p1" else done(lease, node)
    step = make_trainer(polar_straggler_deadline=4.0).rollout(0)
    assert [group[0][0].group_index for group in step.nest] == [0, 2]
    assert step.metrics["polar/replaced_stragglers"] == 1
    assert running(server) == []


def test_prefetch_keeps_groups_in_flight_and_uses_them_next(server: Server, gateway: Gateway, make_trainer: Make):
    """Which of those in flight come first is up to them."""
    trainer = make_trainer(polar_prefetch=True, polar_max_async_level=2)
    first = trainer.rollout(0)
    eventually(lambda: len(gateway.tasks()) == 6)
    eventually(lambda: not running(server))
    second = trainer.rollout(1)
    seen = [group[0][0].group_index for step in (first, second) for group in step.nest]
    assert len(set(seen)) == 4
    assert set(seen) <= set(range(6))
    assert second.metrics["polar/staleness/mean"] == 1.0
    assert second.metrics["polar/ledger/balanced"] == 1


def test_groups_too_old_are_dropped_whole(server: Server, gateway: Gateway, make_trainer: Make):
    trainer = make_trainer(polar_prefetch=True, polar_max_async_level=2)
    trainer.rollout(0)
    eventually(lambda: len(gateway.tasks()) == 6)
    eventually(lambda: not running(server))
    step = trainer.rollout(9)
    assert 2 <= step.metrics["polar/dropped_stale_groups"] <= 4
    assert min(group[0][0].group_index for group in step.nest) > 5
    assert step.metrics["polar/staleness/mean"] == 0.0
    assert step.metrics["polar/ledger/balanced"] == 1


class OneVersion(BaseHTTPRequestHandler):
    """An engine that never gets new weights."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b'{"weight_version": "1"}')

    def log_message(self, format: str, *args: object) -> None:
        """Nobody reads it."""


def test_an_engine_that_never_gets_new_weights_is_named(gateway: Gateway, make_trainer: Make):
    with ThreadingHTTPServer(("127.0.0.1", 0), OneVersion) as engine:
        threading.Thread(target=engine.serve_forever, daemon=True).start()
        router = {"sglang_router_ip": "127.0.0.1", "sglang_router_port": engine.server_address[1]}
        trainer = make_trainer(**router, polar_max_consecutive_drops=3)
        trainer.rollout(0)
        with pytest.raises(BridgeFault, match=r"3 × stale: .* told version 1 since rollout 0: does it get the new w"):
            trainer.rollout(9)
        engine.shutdown()


def test_closing_cancels_what_is_in_flight(server: Server, gateway: Gateway, make_trainer: Make):
    gateway.script = lambda lease, node: None if int(task_of(lease)["instruction"][1:]) > 1 else done(lease, node)
    make_trainer(polar_prefetch=True).rollout(0)
    eventually(lambda: len(gateway.tasks()) == 6)
    assert running(server)
    rollout.close()
    eventually(lambda: not running(server))


def test_a_restart_cancels_what_a_killed_trainer_left(server: Server, gateway: Gateway, make_trainer: Make, tmp_path):
    gateway.script = lambda lease, node: None if int(task_of(lease)["instruction"][1:]) > 1 else done(lease, node)
    changed = {"polar_prefetch": True, "save": str(tmp_path)}
    trainer = make_trainer(**changed)
    settings = changed | {"polar_rollout_url": server.url, "prompt_data": trainer.args.prompt_data, "load": None}
    command = [sys.executable, "-m", "tests.bridge.dying_trainer", json.dumps(settings)]
    dying = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert dying.stdout is not None
        assert dying.stdout.readline() == b"done\n"
        left = eventually(lambda: len(running(server)) == 4 and running(server), 60)
    finally:
        dying.kill()
        dying.communicate()
    gateway.script = done
    trainer.rollout(0)
    eventually(lambda: not set(left) & set(running(server)))


def test_a_server_that_is_killed_and_started_again_loses_nothing(make_trainer: Make, tmp_path):
    """Its callbacks, its tasks and its address are the same afterwards."""
    server, restarted = Server(tmp_path / "server"), []

    def script(lease: Lease, node: Node):
        if not restarted:
            restarted.append(server.restart())
        return done(lease, node)

    gateway = Gateway(server, script)
    step = make_trainer(polar_rollout_url=server.url).rollout(0)
    assert [group[0][0].group_index for group in step.nest] == [0, 1]
    assert restarted
    rollout.close()
    gateway.stop()
    server.stop()


def test_evaluation_gives_every_session_one_vote_and_takes_no_training_prompt(
    gateway: Gateway, make_trainer: Make, tmp_path
):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"input": "e0"}\n{"input": "e1"}\n{"input": "e2"}\n')

    def script(lease: Lease, node: Node):
        if task_of(lease)["instruction"] == "e1":
            return fault(lease, node, retryable=False)
        if task_of(lease)["instruction"] == "e2":
            return without_logprobs(lease, node)
        return done(lease, node)

    gateway.script = script
    trainer = make_trainer(eval_prompt_data=["held_out", str(path)], n_samples_per_eval_prompt=2)
    output = trainer.evaluate(0)
    part = output.data["held_out"]
    assert part["rewards"] == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0]
    assert len(part["truncated"]) == len(part["samples"]) == 6
    assert output.metrics["polar/eval/held_out/resolved_rate"] == pytest.approx(4 / 6)
    assert output.metrics["polar/eval/held_out/success_rate"] == pytest.approx(4 / 6)
    tasks = gateway.tasks()
    seeds = [task["sampling"]["seed"] for task in tasks]
    assert len(set(seeds)) == 3
    assert {task["dispatch_priority"] for task in tasks} == {100}
    trainer.evaluate(1)
    assert sorted(task["sampling"]["seed"] for task in gateway.tasks()[3:]) == sorted(seeds)
    gateway.script = done
    assert trainer.rollout(0).nest[0][0][0].prompt == "p0"


def test_a_callback_is_answered_whatever_it_holds(gateway: Gateway, make_trainer: Make):
    make_trainer().rollout(0)
    url = gateway.tasks()[0]["callback_url"]
    assert "/callback/task_result?token=" in url
    assert httpx.post(url, content=b"{").json()["ok"] is False
    assert "status" in httpx.post(url, content=b'{"task_id": "x"}').json()["reason"]
    assert httpx.post(url, content=b'{"task_id": "x", "status": "running"}').json()["ok"] is False
    assert httpx.post(url, content=b'{"task_id": "x", "status": "completed"}').json() == {"ok": True}
    for guessed in ("guessed", "%C3%A9", "%FF"):
        assert httpx.post(f"{url.partition('?')[0]}?token={guessed}", content=b"{}").status_code == 403


def test_case_049_a_doubled_callback_and_a_result_after_the_step_change_nothing(gateway: Gateway, make_trainer: Make):
    trainer = make_trainer()
    trainer.rollout(0)
    task = gateway.tasks()[0]
    for _ in range(2):
        document = {"task_id": task["task_id"], "status": "completed", "results": []}
        assert httpx.post(task["callback_url"], json=document).json() == {"ok": True}
    step = trainer.rollout(1)
    assert step.metrics["polar/ledger/groups/arrived"] == 4
    assert step.metrics["polar/dropped_groups"] == 0


def test_a_task_the_server_refuses_ends_the_rollout_with_its_words(gateway: Gateway, make_trainer: Make):
    template = {"agent": {"harness": "shell", "custom_shell": {"command": "true"}}, "evaluator": {"strategy": "nope"}}
    with pytest.raises(BridgeFault, match=r"evaluator.strategy: .*nope"):
        make_trainer(polar_task_template=template).rollout(0)


SUBMIT, PROBE = "/rollout/task/submit", b"polar-probe"


def test_a_lost_submission_and_a_lost_reply_to_one_make_one_task(gateway: Gateway, make_trainer: Make, relay: Relay):
    """The first submission is the probe's."""
    relay.lose_request = lambda path, number: path == SUBMIT and number == 1
    relay.lose_answer = lambda path, number: path == SUBMIT and number in (2, 3)
    step = make_trainer(polar_rollout_url=relay.url).rollout(0)
    assert [group[0][0].group_index for group in step.nest] == [0, 1]
    assert len(gateway.tasks()) == 2
    assert relay.calls.count(SUBMIT) >= 4
    assert step.metrics["polar/ledger/groups/arrived"] == 2


def test_a_lost_callback_is_made_good_by_the_poll(gateway: Gateway, make_trainer: Make, relay: Relay):
    relay.rewrite = lambda body: body if PROBE in body else body.replace(b"/callback/task_result", b"/nowhere")
    step = make_trainer(polar_rollout_url=relay.url).rollout(0)
    assert step.metrics["polar/completed_groups"] == 2
    fetched = [path for path in relay.calls if path.startswith("/rollout/task/polar-slime-")]
    assert len(fetched) >= 4, "each task is looked at without its results, then fetched"


def test_a_task_that_the_server_forgot_is_submitted_again(
    server: Server, gateway: Gateway, make_trainer: Make, relay: Relay
):
    """The server accepted it and lost it: its answer says 404."""
    swallowed: list[bytes] = []

    def rewrite(body: bytes) -> bytes:
        if b"task_id" not in body or PROBE in body or swallowed:
            return body
        swallowed.append(body)
        other = body.replace(b"polar-slime-", b"somebody-elses-")
        return other.replace(b"/callback/task_result", b"/nowhere")

    relay.rewrite = rewrite
    step = make_trainer(polar_rollout_url=relay.url).rollout(0)
    assert step.metrics["polar/completed_groups"] == 2
    assert relay.calls.count(SUBMIT) == 4


def test_an_evaluation_that_the_server_refuses_ends_with_its_words(gateway: Gateway, make_trainer: Make, tmp_path):
    path = tmp_path / "eval.jsonl"
    path.write_text('{"input": "e0"}\n{"input": "e1"}\n')
    template = {"agent": {"harness": "shell", "custom_shell": {"command": "true"}}, "evaluator": {"strategy": "nope"}}
    with pytest.raises(BridgeFault, match=r"evaluator.strategy: .*nope"):
        make_trainer(polar_task_template=template, eval_prompt_data=[str(path)]).evaluate(0)


def test_the_reward_hook_hands_out_what_the_evaluator_gave(gateway: Gateway, make_trainer: Make):
    gateway.script = lambda lease, node: done(lease, node, reward=0.25)
    trainer = make_trainer(reward_key="acc")
    step = trainer.rollout(0)
    assert asyncio.run(reward_func(trainer.args, step.samples[0])) == {"acc": 0.25}
    assert asyncio.run(reward_func(trainer.args, step.samples)) == [{"acc": 0.25}] * 4
    with pytest.raises(ValueError, match="polar_async"):
        asyncio.run(reward_func(trainer.args, trainer.data_source.get_samples(1)[0][0]))
