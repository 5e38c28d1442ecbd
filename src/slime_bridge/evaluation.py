"""The evaluation path: every session of every item has one vote, and one that failed counts as 0.

It takes no training prompt, stops nothing early and goes before training tasks.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from polar.client import ClientError
from polar.records import SessionResult, SessionStatus, TaskResult
from slime_bridge.adapter import reward_of, shown_sample
from slime_bridge.config import PolarSlimeConfig, checked_request, task_payload
from slime_bridge.eval_datasets import Dataset, datasets_of
from slime_bridge.groups import BridgeFault
from slime_bridge.metrics import Numbers, mean
from slime_bridge.slime_types import RolloutFnEvalOutput
from slime_bridge.tasks import Tasks

PRIORITY = 100


@dataclass(frozen=True)
class Vote:
    sample: Any
    reward: float
    completed: bool

    @property
    def truncated(self) -> bool:
        return self.sample.status.value == "truncated"


async def evaluate(
    args: Any, config: PolarSlimeConfig, tasks: Tasks, rollout_id: int, run_id: str
) -> RolloutFnEvalOutput:
    """Raises ConfigError for a set that cannot be read, BridgeFault where the server refuses a task."""
    datasets = datasets_of(args, config)
    work = [
        _votes(args, config, tasks, dataset, item, rollout_id, run_id)
        for dataset in datasets
        for item in range(len(dataset.groups))
    ]
    done = iter(await _all(work))
    votes = {dataset.name: list(chain.from_iterable(next(done) for _ in dataset.groups)) for dataset in datasets}
    metrics = {"polar/eval/resolved_rate": mean(vote.reward >= 1.0 for part in votes.values() for vote in part)}
    for name, part in votes.items():
        metrics |= _metrics(f"polar/eval/{name}", part)
    return RolloutFnEvalOutput(data={name: _columns(part) for name, part in votes.items()}, metrics=metrics)


async def _all(work: Sequence[Coroutine[Any, Any, list[Vote]]]) -> list[list[Vote]]:
    """What all of it gives. Raises BridgeFault with the server's words where it refuses one, and cancels the rest."""
    try:
        async with asyncio.TaskGroup() as running:
            runs = [running.create_task(each) for each in work]
    except* ClientError as refused:
        fault = BridgeFault(f"the rollout server refused a task: {refused.exceptions[0]}")
    else:
        return [run.result() for run in runs]
    raise fault


async def _votes(
    args: Any, config: PolarSlimeConfig, tasks: Tasks, dataset: Dataset, position: int, rollout_id: int, run_id: str
) -> list[Vote]:
    group = dataset.groups[position]
    seed = zlib.crc32(f"{dataset.name}/{position}".encode())
    payload = task_payload(
        args,
        config,
        group,
        rollout_id=rollout_id,
        task_position=position,
        sampling={**dataset.sampling, "seed": seed},
        metadata={"rollout_step": rollout_id, "run_id": run_id, "eval_dataset": dataset.name},
        dispatch_priority=PRIORITY,
        early_stop_min_usable_sessions=None,
    )
    payload["task_id"] = f"{payload['task_id']}-eval-{dataset.name}-{run_id}-{position}".replace("/", "_")
    return voting(await tasks.run(checked_request(payload)), group, config)


def voting(result: TaskResult, group: Sequence[Any], config: PolarSlimeConfig) -> list[Vote]:
    """One for each of the group's samples, also for a session that failed or never came back."""
    by_index = {session.metadata.get("session_index"): session for session in result.results}
    return [_vote(by_index.get(index), source, config) for index, source in enumerate(group)]


def _vote(result: SessionResult | None, source: Any, config: PolarSlimeConfig) -> Vote:
    reward = reward_of(result, config.rules)
    completed = result is not None and result.status is SessionStatus.COMPLETED
    return Vote(shown_sample(result, source, config.rules, reward), reward, completed)


def _columns(votes: Sequence[Vote]) -> dict[str, list[Any]]:
    """As RolloutFnEvalOutput has a set: lists of the same length."""
    return {
        "rewards": [vote.reward for vote in votes],
        "truncated": [vote.truncated for vote in votes],
        "samples": [vote.sample for vote in votes],
    }


def _metrics(prefix: str, votes: Sequence[Vote]) -> Numbers:
    return {
        f"{prefix}/reward_mean": mean(vote.reward for vote in votes),
        f"{prefix}/resolved_rate": mean(vote.reward >= 1.0 for vote in votes),
        f"{prefix}/success_rate": mean(vote.completed for vote in votes),
        f"{prefix}/truncated_rate": mean(vote.truncated for vote in votes),
        f"{prefix}/sessions": len(votes),
        f"{prefix}/failed_sessions": sum(not vote.completed for vote in votes),
    }
