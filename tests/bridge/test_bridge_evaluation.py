"""Evaluation: a fixed denominator, one vote a session, the set's own sampling, and nothing taken from training."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tests.bridge.conftest import Gateway
from tests.bridge.making import arguments, session, task, trace
from tests.peers.node import Node, done, fault
from tests.peers.trainer import Trainer
from tests.server.conftest import Server, eventually

from polar.errors import ConfigError
from polar.nodeapi import Lease
from polar.records import SessionResult, TaskState, Termination
from slime_bridge.config import resolve_polar_slime_config
from slime_bridge.eval_datasets import datasets_of
from slime_bridge.evaluation import voting
from slime_bridge.slime_types import Sample

Make = Callable[..., Trainer]


def items(folder: Path, name: str, *rows: dict[str, Any]) -> str:
    path = folder / f"{name}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def votes(*sessions: SessionResult, size: int, status: TaskState = TaskState.COMPLETED, **settings: Any) -> list[Any]:
    config = resolve_polar_slime_config(arguments(**settings))
    return voting(task(*sessions, status=status), [Sample(index=number) for number in range(size)], config)


def test_each_session_has_one_vote_whatever_came_of_it():
    fan_out = session(0, trace(reward=1.0), trace(reward=1.0, mask=(1, 1)))
    late = session(3, trace(reward=1.0), termination=Termination.AGENT_TIMEOUT)
    lost = session(1, termination=Termination.SANDBOX_START)
    ungraded = session(4, trace(reward=None), termination=Termination.EVALUATION)
    cast = votes(lost, fan_out, ungraded, late, size=5)
    assert [vote.reward for vote in cast] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [vote.sample.reward for vote in cast] == [1.0, 0.0, 0.0, 0.0, 0.0]
    assert [vote.completed for vote in cast] == [True, False, False, False, False]
    assert [vote.sample.status.value for vote in cast] == ["completed", "failed", "failed", "aborted", "failed"]
    assert cast[0].sample.response_length == 2, "the last trace is shown"


@pytest.mark.parametrize("status", [TaskState.FAILED, TaskState.CANCELLED])
def test_a_task_that_failed_is_a_zero_for_each_of_its_sessions(status: TaskState):
    assert [vote.reward for vote in votes(size=3, status=status)] == [0.0, 0.0, 0.0]


def test_what_would_not_be_trained_still_has_its_vote_and_is_shown_as_it_is():
    overlong = session(0, trace(prompt=5000, finish="length"))
    unaligned = session(1, trace(logprobs=None))
    cast = votes(overlong, unaligned, size=2)
    assert [vote.reward for vote in cast] == [1.0, 1.0]
    assert [vote.truncated for vote in cast] == [True, False]
    assert [len(vote.sample.tokens) for vote in cast] == [5004, 7]


def test_a_spent_agent_budget_counts_as_in_training():
    late = session(0, trace(reward=0.5), termination=Termination.AGENT_TIMEOUT)
    (vote,) = votes(late, size=1, polar_timeout_policy="truncate")
    assert (vote.reward, vote.truncated) == (0.5, True)


def test_a_harness_that_makes_no_calls_is_graded_by_the_evaluator():
    oracle = session(0)
    assert oracle.trajectory is not None
    oracle.trajectory.metadata["evaluation"] = {"outcome_reward": 1.0}
    (vote,) = votes(oracle, size=1)
    assert vote.reward == 1.0


def sets(*configured: SimpleNamespace, **changed: Any) -> Sequence[Any]:
    args = arguments(eval_datasets=list(configured), **changed)
    return datasets_of(args, resolve_polar_slime_config(args))


def test_a_set_has_its_own_items_keys_and_sampling(tmp_path: Path):
    path = items(tmp_path, "sums", {"q": "1+1", "a": "2", "info": {"level": 1}}, {"q": "2+2", "a": "4"})
    own = SimpleNamespace(
        name="sums",
        path=path,
        input_key="q",
        label_key="a",
        metadata_key="info",
        n_samples_per_eval_prompt=2,
        temperature=0.0,
        top_p=None,
        max_response_len=99,
        metadata_overrides={"split": "held out"},
    )
    (made,) = sets(own, rollout_temperature=1.0, rollout_top_k=7)
    assert [[sample.prompt for sample in group] for group in made.groups] == [["1+1"] * 2, ["2+2"] * 2]
    assert [sample.label for group in made.groups for sample in group] == ["2", "2", "4", "4"]
    assert made.groups[0][0].metadata == {"level": 1, "split": "held out"}
    assert [sample.index for group in made.groups for sample in group] == [0, 1, 2, 3]
    assert made.sampling == {
        "temperature": 0.0,
        "top_p": 1.0,
        "top_k": 7,
        "max_tokens": 99,
        "stop_token_ids": [9],
    }


def test_settings_for_all_sets_stand_behind_a_sets_own(tmp_path: Path):
    path = items(tmp_path, "plain", {"input": "x"})
    changed = {"eval_temperature": 0.5, "eval_top_p": 0.9, "n_samples_per_eval_prompt": 3, "eval_input_key": "input"}
    (made,) = sets(SimpleNamespace(name="plain", path=path, top_p=0.8), **changed)
    assert (made.sampling["temperature"], made.sampling["top_p"], len(made.groups[0])) == (0.5, 0.8, 3)


def test_sets_that_cannot_be_evaluated_are_named(tmp_path: Path):
    empty = SimpleNamespace(name="none", path=items(tmp_path, "empty"))
    keyless = SimpleNamespace(name="odd", path=items(tmp_path, "keyless", {"input": "x"}, {"question": "x"}))
    with pytest.raises(ConfigError, match="the evaluation set none has no items"):
        sets(empty)
    with pytest.raises(ConfigError, match=r"row 2: no 'input'.*set odd"):
        sets(keyless)
    with pytest.raises(ConfigError, match="a name stands twice in none, none"):
        sets(empty, empty)
    with pytest.raises(ConfigError, match="eval_prompt_data"):
        sets(eval_prompt_data=[])


def test_sets_are_evaluated_with_stable_seeds_before_training_and_without_early_stop(
    gateway: Gateway, make_trainer: Make, tmp_path: Path
):
    """Two sets, of which one has a failing item; then the same again."""
    one = SimpleNamespace(name="one", path=items(tmp_path, "one", {"input": "e0"}, {"input": "e1"}), temperature=0.25)
    two = SimpleNamespace(name="two", path=items(tmp_path, "two", {"input": "e0"}), n_samples_per_eval_prompt=3)

    def script(lease: Lease, node: Node):
        return fault(lease, node, retryable=False) if lease.task["instruction"] == "e1" else done(lease, node)

    gateway.script = script
    template = arguments().polar_task_template | {"early_stop_min_usable_sessions": 1, "dispatch_priority": 5}
    trainer = make_trainer(eval_datasets=[one, two], polar_task_template=template)
    output = trainer.evaluate(0)
    assert {name: part["rewards"] for name, part in output.data.items()} == {"one": [1.0, 0.0], "two": [1.0] * 3}
    for part in output.data.values():
        assert len(part["rewards"]) == len(part["truncated"]) == len(part["samples"])
    told = {name.removeprefix("polar/eval/"): value for name, value in output.metrics.items()}
    assert (told["one/reward_mean"], told["one/sessions"], told["one/failed_sessions"]) == (0.5, 2, 1)
    assert (told["two/resolved_rate"], told["two/success_rate"], told["resolved_rate"]) == (1.0, 1.0, 0.8)
    first = gateway.tasks()
    assert {task["early_stop_min_usable_sessions"] for task in first} == {None}
    assert {task["dispatch_priority"] for task in first} == {100}
    assert sorted(task["sampling"]["temperature"] for task in first) == [0.25, 0.25, 1.0]
    trainer.evaluate(7)
    again = gateway.tasks()[len(first) :]
    assert seeds(again) == seeds(first)
    assert len(set(seeds(first))) == 3


def seeds(tasks: list[dict[str, Any]]) -> list[int]:
    return sorted(task["sampling"]["seed"] for task in tasks)


def test_evaluation_runs_while_training_tasks_are_in_flight_and_leaves_them_alone(
    server: Server, gateway: Gateway, make_trainer: Make, tmp_path: Path
):
    held: list[bool] = [True]

    def ahead(task: dict[str, Any]) -> bool:
        return task["instruction"] in ("p2", "p3", "p4", "p5")

    def script(lease: Lease, node: Node):
        return None if ahead(lease.task) and held else done(lease, node)

    gateway.script = script
    path = items(tmp_path, "during", {"input": "e0"}, {"input": "e1"})
    trainer = make_trainer(polar_prefetch=True, eval_prompt_data=["during", path], n_samples_per_eval_prompt=2)
    trainer.rollout(0)
    in_flight = eventually(lambda: len(gateway.tasks()) == 6 and list(filter(ahead, gateway.tasks())))
    output = trainer.evaluate(0)
    assert output.data["during"]["rewards"] == [1.0] * 4
    states = {server.task(task["task_id"], results="false")["status"] for task in in_flight}
    assert states == {"running"}
    held.clear()
    gateway.release()
    step = trainer.rollout(1)
    assert [group[0][0].prompt for group in step.nest] == ["p2", "p3"]
    assert step.metrics["polar/ledger/groups/trained"] == 4
    assert step.metrics["polar/ledger/balanced"] == 1


def test_a_row_that_the_template_cannot_use_is_an_error_in_the_templates_words(make_trainer: Make, tmp_path: Path):
    """Two rows fail; the trainer is told of one, not of a group of errors."""
    path = items(tmp_path, "rows", {"input": "e0"}, {"input": "e1"})
    template = arguments().polar_task_template | {"labels": {"kind": "{sample.metadata.kind}"}}
    trainer = make_trainer(prompt_data=None, eval_prompt_data=["rows", path], polar_task_template=template)
    with pytest.raises(ConfigError, match=r"sample\.metadata\.kind"):
        trainer.evaluate(0)
