"""The real Slime loss over the bridge's samples: every trajectory weighs once, and only what was sampled is trained.

At ratio 1: d loss / d logp_t = −advantage · mask_t / (max(Σ mask of the trajectory's samples, 1) · global_batch_size).
Slime's fused cross entropy rounds its gradient to bf16, hence the tolerance.
"""

from __future__ import annotations

import os
import random
import socket
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed
from megatron.core import mpu
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
from tests.bridge.making import group, session, task, trace
from tests.slime.closed_form import advantages, gradients
from tests.slime.inside.inside_manager import manager_with, train_data_of

from polar.records import SessionResult, Termination
from slime_bridge.acceptance import Group, judge
from slime_bridge.adapter import ConversionRules
from slime_bridge.slime_types import trajectory_of

VOCABULARY = 256
TOLERANCE = 4e-3
PROMPTS, SESSIONS, STEPS = 4, 4, 2
GLOBAL_BATCH = PROMPTS * SESSIONS // STEPS
LOST = (Termination.NO_CALLS, Termination.SANDBOX_START, Termination.EVALUATION, Termination.AGENT_TIMEOUT)
MEASURED: list[float] = []


class Settings(Namespace):
    """Slime's args: a switch that is not given is off."""

    def __getattr__(self, name: str) -> None:
        return None


SETTINGS = Settings(
    advantage_estimator="grpo",
    loss_type="policy_loss",
    kl_coef=0.0,
    kl_loss_coef=0.0,
    entropy_coef=0.0,
    eps_clip=0.2,
    eps_clip_high=0.2,
    rollout_temperature=1.0,
    rollout_top_p=1.0,
    qkv_format="thd",
    calculate_per_token_loss=False,
    log_probs_chunk_size=-1,
)


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    mpu.initialize_model_parallel(1, 1)
    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    print(f"\nmeasured: largest relative deviation of {len(MEASURED)} tokens' gradients: {max(MEASURED):.2e}")


def played(chance: random.Random, index: int) -> SessionResult:
    """A session with up to four traces, of which some tokens were sampled; one in four is lost in some way."""
    masks = [[chance.randint(0, 1) for _ in range(chance.randint(1, 12))] for _ in range(chance.randint(1, 4))]
    masks[0][-1] = 1
    reward = round(chance.random(), 3)
    traces = [trace(prompt=chance.randint(1, 9), mask=tuple(mask), reward=reward) for mask in masks]
    ending = chance.choice(LOST) if chance.random() < 0.25 else chance.choice((Termination.DONE, Termination.LIMIT))
    return session(index, *traces, termination=ending)


def groups_of(chance: random.Random) -> list[list[list[Any]]]:
    """Accepted groups: what is dropped whole is replaced, as in a rollout."""
    found: list[list[list[Any]]] = []
    while len(found) < PROMPTS:
        number = len(found)
        results = [played(chance, index) for index in range(SESSIONS)]
        source = group(SESSIONS, group_index=number, first=SESSIONS * number)
        verdict = judge(task(*results), source, ConversionRules(), submitted=0, min_fraction=0.0)
        if isinstance(verdict, Group):
            found.append(verdict.samples)
    return found


@pytest.mark.parametrize("std", [False, True], ids=["plain", "std"])
@pytest.mark.parametrize("seed", range(12))
def test_the_gradient_of_every_token_is_the_closed_form(seed: int, std: bool):
    groups = groups_of(random.Random(seed))
    assert any(len(traces) > 1 for each in groups for traces in each)
    manager = manager_with(groups, grpo_std_normalization=std, global_batch_size=GLOBAL_BATCH, max_tokens_per_gpu=48)
    flat, data = train_data_of(manager)
    found = gradient_by_sample(split(manager, data))
    assert sorted(found) == list(range(len(flat)))
    for at, expected in enumerate(closed_form(flat, std)):
        assert_close(found[at], expected)


def closed_form(flat: list[Any], std: bool) -> list[np.ndarray]:
    rewards: dict[int, dict[Any, float]] = defaultdict(dict)
    sums: dict[Any, int] = defaultdict(int)
    for sample in flat:
        sums[trajectory_of(sample)] += sum(sample.loss_mask)
        if any(sample.loss_mask):
            rewards[sample.group_index][trajectory_of(sample)] = sample.reward
    worth = {name: value for each in rewards.values() for name, value in advantages(each, std=std).items()}
    return [
        gradients(worth.get(name, 0.0), sample.loss_mask, sums[name], GLOBAL_BATCH)
        for sample, name in ((sample, trajectory_of(sample)) for sample in flat)
    ]


def assert_close(found: np.ndarray, expected: np.ndarray) -> None:
    trained = expected != 0
    assert (np.abs(found[~trained]) < 1e-9).all(), "a token that is not trained has a gradient"
    deviations = np.abs(found[trained] / expected[trained] - 1)
    MEASURED.extend(deviations.tolist())
    assert (deviations < TOLERANCE).all(), (found, expected)


def split(manager: Any, data: dict[str, Any]) -> list[dict[str, Any]]:
    """What each of two ranks gets."""
    if "rollout_ids" in data:
        del data["group_ids"], data["group_mask_sums"]
    return [box.inner for box in manager._split_train_data_by_dp(data)]


def gradient_by_sample(ranks: list[dict[str, Any]]) -> dict[int, np.ndarray]:
    """By place in the rollout; each sample from the micro-batch of the step that the real schedule puts it in."""
    found: dict[int, np.ndarray] = {}
    for rank in ranks:
        assert rank["global_batch_sizes"] == [GLOBAL_BATCH] * STEPS
        batches = iter(rank["micro_batch_indices"])
        for step in range(STEPS):
            for _ in range(count := rank["num_microbatches"][step]):
                places = next(batches)
                measured = gradient_of(rank, places, count)
                found |= {rank["partition"][place]: each for place, each in zip(places, measured, strict=True)}
        assert next(batches, None) is None
    return found


def gradient_of(rank: dict[str, Any], places: list[int], microbatches: int) -> list[np.ndarray]:
    """d loss / d logp of the response tokens of these samples, in one micro-batch of the real loss; a step's gradient
    is the mean over its micro-batches."""
    tokens = [torch.as_tensor(rank["tokens"][place]) for place in places]
    lengths = [int(rank["response_lengths"][place]) for place in places]
    name = "rollout_mask_sums" if "rollout_mask_sums" in rank else "group_mask_sums"
    batch: dict[str, Any] = {
        "unconcat_tokens": tokens,
        "tokens": torch.cat(tokens)[None],
        "total_lengths": [len(ids) for ids in tokens],
        "response_lengths": lengths,
        "loss_masks": [torch.as_tensor(rank["loss_masks"][place], dtype=torch.int) for place in places],
        "rollout_log_probs": [torch.as_tensor(rank["rollout_log_probs"][place]) for place in places],
        "rewards": [float(rank["rewards"][place]) for place in places],
        name: torch.tensor([float(rank[name][place]) for place in places]),
    }
    compute_advantages_and_returns(SETTINGS, batch)
    logits = torch.zeros(1, sum(batch["total_lengths"]), VOCABULARY, requires_grad=True)
    loss, _, _ = loss_function(SETTINGS, batch, microbatches, GLOBAL_BATCH, logits)
    (loss / microbatches).backward()
    assert logits.grad is not None
    found, start = [], 0
    for ids, length in zip(tokens, lengths, strict=True):
        at = torch.arange(start + len(ids) - length, start + len(ids))
        found.append((logits.grad[0, at - 1, ids[-length:]] / (1 - 1 / VOCABULARY)).double().numpy())
        start += len(ids)
    return found
