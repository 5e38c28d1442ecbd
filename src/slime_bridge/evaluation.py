"""The evaluation path: every session of every item has one vote, and one that failed counts as 0.

It takes no training prompt, stops nothing early and goes before training tasks.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polar.client import ClientError
from polar.records import SessionResult, SessionStatus, TaskResult
from slime_bridge.adapter import reward_of, shown_sample
from slime_bridge.config import PolarSlimeConfig, checked_request, sampling_of, task_payload
from slime_bridge.groups import BridgeFault
from slime_bridge.metrics import mean
from slime_bridge.slime_types import RolloutFnEvalOutput, Sample, read_file
from slime_bridge.tasks import Tasks

PRIORITY = 100
_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_response_len",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_new_tokens",
}


@dataclass(frozen=True)
class Dataset:
    """One evaluation set: its groups in the file's order, and the sampling they ask for."""

    name: str
    groups: Sequence[list[Any]]
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Vote:
    sample: Any
    reward: float
    completed: bool


async def evaluate(
    args: Any, config: PolarSlimeConfig, tasks: Tasks, rollout_id: int, run_id: str
) -> RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]] = {}
    metrics: dict[str, float] = {}
    for dataset in datasets_of(args, config):
        items = range(len(dataset.groups))
        work = [_votes(args, config, tasks, dataset, item, rollout_id, run_id) for item in items]
        votes = [vote for part in await _all(work) for vote in part]
        data[dataset.name] = {
            "rewards": [vote.reward for vote in votes],
            "truncated": [vote.sample.status.value == "truncated" for vote in votes],
            "samples": [vote.sample for vote in votes],
        }
        metrics |= _metrics(f"polar/eval/{dataset.name}", votes)
    metrics["polar/eval/resolved_rate"] = mean(reward >= 1.0 for part in data.values() for reward in part["rewards"])
    return RolloutFnEvalOutput(data=data, metrics=metrics)


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


def datasets_of(args: Any, config: PolarSlimeConfig) -> list[Dataset]:
    """Slime's eval_datasets, else the pairs of name and path in eval_prompt_data (a lone path has the default name)."""
    configured = getattr(args, "eval_datasets", None)
    if configured:
        return [_dataset(args, config, each.name, each.path, each) for each in configured]
    pairs = list(getattr(args, "eval_prompt_data", None) or [])
    if len(pairs) == 1:
        pairs = [config.eval_dataset_name, *pairs]
    return [_dataset(args, config, name, path, None) for name, path in zip(pairs[::2], pairs[1::2], strict=True)]


def _dataset(args: Any, config: PolarSlimeConfig, name: str, path: str, own: Any) -> Dataset:
    def setting(key: str, default: Any = None) -> Any:
        mine = getattr(own, key, None)
        return mine if mine is not None else getattr(args, key, default)

    size = setting("n_samples_per_eval_prompt", 1) or 1
    groups = []
    for number, row in enumerate(read_file(path)):
        metadata = row.get(setting("metadata_key", "metadata")) or {}
        label_key = setting("label_key")
        prompt = Sample(
            group_index=number,
            prompt=row[setting("input_key", "input")],
            label=row[label_key] if label_key else None,
            metadata={**metadata, **(getattr(own, "metadata_overrides", None) or {})},
        )
        groups.append([replace(prompt, index=number * size + offset) for offset in range(size)])
    return Dataset(name, groups, config.sampling | (sampling_of(own, _SETTINGS) if own is not None else {}))


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


def _metrics(prefix: str, votes: Sequence[Vote]) -> dict[str, float]:
    return {
        f"{prefix}/reward_mean": mean(vote.reward for vote in votes),
        f"{prefix}/resolved_rate": mean(vote.reward >= 1.0 for vote in votes),
        f"{prefix}/success_rate": mean(vote.completed for vote in votes),
        f"{prefix}/sessions": len(votes),
    }
