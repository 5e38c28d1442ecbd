"""Every number of the trainer's log: documented, always there, finite, and what its name says."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.bridge.conftest import Gateway
from tests.bridge.making import group, session, task, trace
from tests.bridge.real_results import task_results
from tests.peers.trainer import Trainer

from polar.records import CallCounts, Drop, Exclusion, SessionTiming, Termination
from slime_bridge.acceptance import Dropped, Group, judge
from slime_bridge.fitting import ConversionRules
from slime_bridge.ledger import Ledger
from slime_bridge.metrics import SinceLastCall, train_metrics
from slime_bridge.staleness import Age

UNUSED = ("masked_session", "overlong", "empty")
DOCS = Path(__file__).parents[2] / "docs" / "metrics.md"
PLACES = {
    "drop": [drop.value for drop in Drop],
    "reason": [reason.value for reason in Exclusion],
    "stage": [name.removesuffix("_ms") for name in SessionTiming.__struct_fields__],
    "dataset": ["held_out"],
}
CONTRACT = [
    "dropped_zero_trainable_groups",
    "dropped_low_complete_fraction_groups",
    "dropped_logprob_error_groups",
    "dropped_failed_groups",
    "dropped_stale_groups",
    "dropped_groups",
    "dropped_sessions",
    "completed_groups",
    "session_ms/register_to_init_queue_mean",
    "session_ms/init_mean",
    "session_ms/run_mean",
    "session_ms/postrun_mean",
    "reward_mean",
    "reward_std",
    "reward_mean_completed",
    "staleness/mean",
    "rollout_success_rate",
    "scheduler/active_groups",
    "scheduler/active_sessions",
    "scheduler/completed_buffer",
    "scheduler/output_queue",
    "scheduler/deferred_queue",
    "scheduler/requested_groups",
]


def documented() -> set[str]:
    """The names in the first column of the docs' tables, with braces and places filled in."""
    cells = re.findall(r"^\| (polar/[^|]*) \|", DOCS.read_text(), re.MULTILINE)
    return {name for cell in cells for word in re.split(r", (?=polar/)", cell) for name in expanded(word)}


def expanded(word: str) -> Iterator[str]:
    return map("".join, product(*map(options, re.split(r"(\{[^}]*\}|<[^>]*>)", word))))


def options(piece: str) -> list[str]:
    if piece.startswith("{"):
        return piece[1:-1].split(",")
    return PLACES[piece[1:-1]] if piece.startswith("<") else [piece]


def test_every_documented_name_is_there_and_no_other(
    gateway: Gateway, make_trainer: Callable[..., Trainer], tmp_path: Path
):
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"input": "e0"}) + "\n")
    trainer = make_trainer(eval_prompt_data=["held_out", str(items)])
    numbers = trainer.rollout(0).metrics
    told = numbers | trainer.evaluate(0).metrics
    assert set(told) == documented()
    assert {f"polar/{name}" for name in CONTRACT} <= set(numbers)
    assert "polar/eval/resolved_rate" in told
    assert all(type(value) in (int, float) and math.isfinite(value) for value in told.values())
    assert set(trainer.rollout(1).metrics) == set(numbers)


def accepted(*sessions, index: int = 0, rules: ConversionRules | None = None) -> Group:
    source = group(len(sessions), group_index=index, first=10 * index)
    verdict = judge(task(*sessions), source, rules or ConversionRules(), submitted=0, min_fraction=0.0)
    assert isinstance(verdict, Group)
    return verdict


def numbers_of(*groups: Group, since: SinceLastCall | None = None, **scheduler: int) -> dict[str, float]:
    ledger = Ledger()
    for each in groups:
        ledger.accepted(each.arrived, each.trained, each.unused)
        ledger.handed_over(each.trained)
    ages = [Age(number, 0) for number, _ in enumerate(groups)]
    told = train_metrics(groups, ages, since or SinceLastCall(), scheduler, ledger)
    return {name.removeprefix("polar/"): value for name, value in told.items()}


def test_rewards_rates_and_traces_are_over_sessions():
    good = session(0, trace(reward=1.0), trace(reward=1.0), trace(mask=(0,)))
    cut = session(1, trace(reward=0.5, finish="length"))
    late = session(2, trace(), termination=Termination.AGENT_TIMEOUT)
    told = numbers_of(accepted(good, cut, late), completed=1)
    assert (told["reward_mean"], told["reward_mean_completed"]) == (0.5, 0.75)
    assert told["reward_std"] == pytest.approx(0.5)
    assert told["rollout_success_rate"] == pytest.approx(2 / 3)
    assert told["truncated_rate"] == pytest.approx(1 / 3)
    assert (told["samples_per_trajectory"], told["samples_per_trajectory_max"]) == (1.5, 2)
    assert (told["dropped_sessions"], told["dropped_traces/empty"]) == (1, 1)
    assert (told["tokens/trained"], told["ledger/tokens/dropped/masked_session"]) == (9, 3)


def test_tokens_of_dropped_groups_are_wasted_by_name():
    since = SinceLastCall()
    since.dropped(Dropped(Drop.STALE, 40, 4, ""))
    since.dropped(Dropped(Drop.STALE, 2, 4, ""))
    since.dropped(Dropped(Drop.LOGPROB_ERROR, 5, 4, ""))
    told = numbers_of(accepted(session(0, trace())), since=since)
    assert (told["dropped_stale_groups"], told["wasted_tokens/stale"]) == (2, 42)
    assert (told["dropped_groups"], told["dropped_sessions"]) == (3, 12)
    assert told["wasted_tokens/failed"] == 0


def test_traces_of_dropped_groups_are_counted_too():
    lost = task(session(0, trace(prompt=20), trace(prompt=0)))
    dropped = judge(lost, group(1), ConversionRules(max_tokens=9), submitted=0, min_fraction=0.0)
    assert isinstance(dropped, Dropped)
    since = SinceLastCall()
    since.dropped(dropped)
    told = numbers_of(since=since)
    assert (told["dropped_traces/overlong"], told["dropped_traces/empty"]) == (1, 1)
    assert told["wasted_tokens/zero_trainable"] == 6


def test_tokens_trained_are_told_per_token_sampled_and_cuts_are_counted():
    rules = ConversionRules(overlong="clip", max_tokens=5)
    told = numbers_of(accepted(session(0, trace(), trace(prompt=6)), rules=rules))
    assert (told["tokens/sampled"], told["tokens/trainable"], told["tokens/excluded"]) == (8, 6, 2)
    assert told["tokens/excluded/aborted"] == 2
    assert (told["tokens/trained"], told["tokens/trained_per_sampled"]) == (2, 0.25)
    assert (told["clipped_traces"], told["dropped_traces/overlong"]) == (1, 1)
    assert told["ledger/tokens/dropped/overlong"] == 4


def test_versions_ages_and_drift_are_told():
    one = session(0, trace(versions=[(0, 1, "3"), (1, 4, "4")]))
    assert one.trajectory is not None
    one.trajectory.metadata["calls"] = {"drift": 2, "prompt_tokens": 100, "prefilled_again": 5}
    told = numbers_of(accepted(one), accepted(session(0, trace()), index=1))
    assert (told["versions_spanned"], told["versions_spanned_max"]) == (1.5, 2)
    assert (told["staleness/mean"], told["staleness/max"]) == (0.5, 1)
    assert (told["calls/drift"], told["calls/prefilled_again_share"]) == (2, 0.05)
    assert {name.removeprefix("calls/") for name in told if name.startswith("calls/")} >= set(
        CallCounts.__struct_fields__
    )


def test_a_stages_mean_is_over_the_sessions_that_came_to_it():
    timed = [SessionTiming(init_ms=10.0, run_ms=100.0), SessionTiming(init_ms=30.0), SessionTiming(init_ms=math.nan)]
    sessions = [session(index, trace(), timing=timing) for index, timing in enumerate(timed)]
    told = numbers_of(accepted(*sessions))
    assert (told["session_ms/init_mean"], told["session_ms/run_mean"]) == (20.0, 100.0)
    assert told["session_ms/postrun_mean"] == 0.0


@settings(max_examples=20)
@given(st.lists(task_results(max_size=3), max_size=2), st.sampled_from([None, 6]))
def test_any_real_groups_give_finite_numbers_that_balance(drawn, cap: int | None):
    groups, since = [], SinceLastCall()
    for number, (result, size) in enumerate(drawn):
        source = group(size, group_index=number, first=10 * number)
        verdict = judge(result, source, ConversionRules(max_tokens=cap), submitted=0, min_fraction=0.0)
        if isinstance(verdict, Group):
            groups.append(verdict)
        else:
            since.dropped(verdict)
    told = numbers_of(*groups, since=since)
    assert all(type(value) in (int, float) and np.isfinite(np.float32(value)) for value in told.values())
    assert told["ledger/balanced"] == 1
    assert told["tokens/sampled"] == told["tokens/trainable"] + told["tokens/excluded"]
    assert told["tokens/trained"] + sum(told[f"ledger/tokens/dropped/{name}"] for name in UNUSED) == sum(
        each.arrived for each in groups
    )
