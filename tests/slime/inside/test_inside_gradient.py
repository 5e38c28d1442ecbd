"""The real Slime loss over the bridge's samples: every trajectory weighs once, and only what was sampled is trained.

At ratio 1: d loss / d logp_t = −advantage · mask_t / (max(Σ mask of the trajectory's samples, 1) · global_batch_size).
Slime's fused cross entropy rounds its gradient to bf16, hence the tolerance.
"""

from __future__ import annotations

import os
import socket
from argparse import Namespace
from typing import Any

import pytest
import torch
import torch.distributed
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from megatron.core import mpu
from slime.backends.megatron_utils.loss import compute_advantages_and_returns, loss_function
from tests.bridge.making import group, session, task, trace
from tests.slime.inside.inside_manager import manager_with, train_data_of

from polar.records import Termination
from slime_bridge.acceptance import Group, judge
from slime_bridge.adapter import ConversionRules
from slime_bridge.slime_types import trajectory_of

VOCABULARY = 256
TOLERANCE = 4e-3


class Settings(Namespace):
    """Slime's args: a switch that is not given is off."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.distributed.init_process_group("gloo", rank=0, world_size=1)
    mpu.initialize_model_parallel(1, 1)
    yield
    mpu.destroy_model_parallel()
    torch.distributed.destroy_process_group()


TRACES = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6).filter(any), min_size=1, max_size=3)
ENDINGS = st.sampled_from([*[Termination.DONE] * 3, Termination.LIMIT, Termination.NO_CALLS])
SESSION = st.tuples(TRACES, st.sampled_from([0.0, 1.0]), ENDINGS)


@given(st.lists(st.lists(SESSION, min_size=3, max_size=3), min_size=2, max_size=2), st.booleans())
@settings(max_examples=25)
def test_the_gradient_of_every_token_is_the_closed_form(played, std: bool):
    groups = []
    for number, sessions in enumerate(played):
        results = [
            session(index, *(trace(mask=tuple(mask), reward=reward) for mask in masks), termination=ending)
            for index, (masks, reward, ending) in enumerate(sessions)
        ]
        source = group(3, group_index=number, first=3 * number)
        verdict = judge(task(*results), source, ConversionRules(), submitted=0, min_fraction=0.0)
        assume(isinstance(verdict, Group))
        groups.append(verdict.samples)
    flat, data = train_data_of(manager_with(groups, grpo_std_normalization=std))
    assume(any(data["rewards"]))
    gradients = gradient_by_token(data, global_batch_size=6)
    sums: dict[Any, int] = {}
    for sample in flat:
        sums[trajectory_of(sample)] = sums.get(trajectory_of(sample), 0) + sum(sample.loss_mask)
    for sample, advantage, gradient in zip(flat, data["rewards"], gradients, strict=True):
        weight = -advantage / (max(sums[trajectory_of(sample)], 1) * 6)
        expected = torch.tensor([weight * mask for mask in sample.loss_mask])
        assert gradient.any() == bool(advantage and any(sample.loss_mask))
        assert torch.allclose(gradient, expected, rtol=TOLERANCE, atol=1e-7), (gradient, expected)


def gradient_by_token(data: dict[str, Any], *, global_batch_size: int) -> list[torch.Tensor]:
    """d loss / d logp of the response tokens of each sample, from the real loss in one micro-batch."""
    args = Settings(
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
    tokens = [torch.tensor(ids) for ids in data["tokens"]]
    sums = torch.tensor(data["group_mask_sums"], dtype=torch.float32)
    batch: dict[str, Any] = {
        "unconcat_tokens": tokens,
        "tokens": torch.cat(tokens)[None],
        "total_lengths": [len(ids) for ids in tokens],
        "response_lengths": data["response_lengths"],
        "loss_masks": [torch.tensor(mask, dtype=torch.int) for mask in data["loss_masks"]],
        "rollout_log_probs": [torch.tensor(logprobs) for logprobs in data["rollout_log_probs"]],
        "rewards": data["rewards"],
        "group_mask_sums": sums,
        "rollout_mask_sums": sums,
    }
    compute_advantages_and_returns(args, batch)
    logits = torch.zeros(1, sum(batch["total_lengths"]), VOCABULARY, requires_grad=True)
    loss, _, _ = loss_function(args, batch, 1, global_batch_size, logits)
    loss.backward()
    assert logits.grad is not None
    found, start = [], 0
    for ids, length in zip(tokens, batch["response_lengths"], strict=True):
        places = torch.arange(start + len(ids) - length, start + len(ids))
        found.append(logits.grad[0, places - 1, ids[-length:]] / (1 - 1 / VOCABULARY))
        start += len(ids)
    return found
