"""miles' own manager, loader and data source over the bridge's hooks; the manager's methods without Ray."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from miles.ray.rollout import RolloutManager
from miles.rollout.sglang_rollout import generate_rollout
from miles.utils.misc import load_function
from tests.bridge.conftest import Gateway
from tests.bridge.making import group, session, task, trace
from tests.peers.node import Node, done
from tests.peers.trainer import Trainer

from polar.nodeapi import Lease
from polar.records import Drop, Termination
from slime_bridge.acceptance import Dropped, Group, judge
from slime_bridge.fitting import ConversionRules
from slime_bridge.groups import BridgeFault
from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.slime_types import RolloutDataSourceWithBuffer, Sample, grouping_field

HOOKS = [
    "slime_bridge.rollout.generate_rollout_polar_async",
    "slime_bridge.reward.reward_func",
    "slime_bridge.reward_post_process.post_process_rewards",
    "slime_bridge.data_source.CeilEpochRolloutDataSourceWithBuffer",
]


def test_the_types_are_those_of_miles():
    assert Sample.__module__ == "miles.utils.types"
    assert RolloutDataSourceWithBuffer.__module__ == "miles.rollout.data_source"
    assert grouping_field() is None


def test_its_loader_finds_the_hooks_and_the_rollout_function_has_its_signature():
    rollout, _, _, source = (load_function(name) for name in HOOKS)
    ours, theirs = inspect.signature(rollout).parameters, inspect.signature(generate_rollout).parameters
    assert [(each.name, each.kind, each.default) for each in ours.values()] == [
        (each.name, each.kind, each.default) for each in theirs.values()
    ]
    assert issubclass(source, RolloutDataSourceWithBuffer)


def manager_of(trainer: Trainer) -> Any:
    manager = object.__new__(RolloutManager)
    settings = {
        "load_debug_rollout_data": None,
        "disable_rollout_trim_samples": False,
        "use_dynamic_global_batch_size": False,
        "global_batch_size": 4,
        "balance_data": False,
        "advantage_estimator": "grpo",
        "rewards_normalization": True,
        "grpo_std_normalization": False,
    }
    manager.args = SimpleNamespace(**(vars(trainer.args) | settings))
    manager.data_source = trainer.data_source
    manager.use_experimental_refactor = False
    manager.generate_rollout = load_function(HOOKS[0])
    manager.custom_reward_post_process_func = post_process_rewards
    manager.custom_convert_samples_to_train_data_func = None
    return manager


def test_its_manager_flattens_converts_and_splits_a_rollout(gateway: Gateway, make_trainer: Callable[..., Trainer]):
    def script(lease: Lease, node: Node):
        lost = lease.task["instruction"] == "p1" and lease.session_index == 1
        return done(lease, node, reward=float(lease.session_index), **(LOST if lost else {}))

    gateway.script = script
    manager = manager_of(make_trainer())
    flat, metrics = manager._get_rollout_data(0)
    assert metrics["polar/completed_groups"] == 2
    assert [(sample.group_index, sample.index) for sample in flat] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    data = manager._convert_samples_to_train_data(flat)
    assert data["tokens"] == [[0, 1, 2, 3, 50, 51, 9]] * 3 + [[0, 0]]
    assert data["loss_masks"] == [[1, 1, 1]] * 3 + [[0]]
    assert data["rollout_log_probs"] == [[-0.5, -0.25, -0.125]] * 3 + [[0.0]]
    assert data["rewards"] == [-1.0, 1.0, 0.0, 0.0]
    manager._split_train_data_by_dp(data, 2)


LOST = {"termination": Termination.EVALUATION, "status": "ERROR", "evaluation": None}


def test_several_traces_of_a_session_are_refused_by_name():
    verdict = judge(
        task(session(0, trace(), trace()), session(1, trace())),
        group(2),
        ConversionRules(),
        submitted=0,
        min_fraction=0,
    )
    assert isinstance(verdict, Dropped)
    assert (verdict.reason, verdict.tokens) == (Drop.FAILED, 9)
    assert "2 traces of one session" in verdict.why
    assert "neither group_id nor rollout_id" in verdict.why
    single = judge(task(session(0, trace()), session(1)), group(2), ConversionRules(), submitted=0, min_fraction=0)
    assert isinstance(single, Group)


def test_a_run_of_such_sessions_ends_with_the_reason(gateway: Gateway, make_trainer: Callable[..., Trainer]):
    def script(lease: Lease, node: Node):
        result = done(lease, node)
        result.traces = [result.traces[0]] * 2
        result.tokens = type(result.tokens)(sampled=6, trainable=6)
        return result

    gateway.script = script
    with pytest.raises(BridgeFault, match="failed: 2 traces of one session"):
        make_trainer(polar_max_consecutive_drops=2).rollout(0)


def test_evaluation_shows_the_last_trace_of_any_session(
    gateway: Gateway, make_trainer: Callable[..., Trainer], tmp_path
):
    path = tmp_path / "items.jsonl"
    path.write_text('{"input": "e0"}\n')
    output = make_trainer(eval_prompt_data=["held_out", str(path)]).evaluate(0)
    assert output.data["held_out"]["rewards"] == [1.0]
    assert type(output).__module__ == "miles.rollout.base_types"
