"""A small GRPO over Slime's train data: every trajectory counts once, whatever the number of its traces.

The loss is Σ_i Σ_t −min(r_it A_i, clip(r_it) A_i) m_it / max(M_i, 1), divided by the number of groups (Slime's word
for the samples of one trajectory): r_it = exp(logp_it − rollout logp_it), A_i the shaped reward of sample i, m_it its
loss mask, M_i the mask's sum over all samples of its group. Its gradient at r = 1 is that of Slime with
`--use-rollout-logprobs`.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from polar_demo.policy import Policy

TrainData = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    learning_rate: float = 5e-5
    clip: float = 0.2
    epochs: int = 2
    minibatches: int = 2
    temperature: float = 1.0


@dataclass(frozen=True)
class Truth:
    """How far the trainer's logprobs of the trainable tokens are from the recorded ones, under the same weights."""

    tokens: int
    logprob_max_abs_diff: float
    ratio_max_abs_gap: float


@dataclass(frozen=True)
class Batch:
    """Right-padded samples: ids [B, T]; mask and rollout logprobs [B, T − 1], place t being the token at t + 1."""

    ids: Tensor
    mask: Tensor
    rollout_logprobs: Tensor
    advantages: Tensor
    group_mask_sums: Tensor
    groups: int


class Trainer:
    """Owns the policy's weights and the optimizer; one `step` a rollout."""

    def __init__(self, policy: Policy, settings: Settings, *, seed: int = 0) -> None:
        self.policy, self.settings = policy, settings
        self.optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.learning_rate, weight_decay=0.0)
        self._shuffle = random.Random(seed)

    def step(self, data: TrainData) -> bool:
        """Train on one rollout. False, and nothing changed, where no sample has an advantage."""
        if not any(
            advantage and sum(mask) for advantage, mask in zip(data["rewards"], data["loss_masks"], strict=True)
        ):
            return False
        self.policy.train()
        for _ in range(self.settings.epochs):
            for rows in self._minibatches(data["group_ids"]):
                loss = self._loss(collate(data, rows))
                self.optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
                self.optimizer.step()
        self.policy.eval()
        return True

    @torch.no_grad()
    def truth(self, data: TrainData) -> Truth:
        """Recompute the logprob of every trainable token; call it before `step`, under the weights that sampled."""
        batch = collate(data, range(len(data["tokens"])))
        difference = (self._logprobs(batch) - batch.rollout_logprobs)[batch.mask.bool()]
        if not len(difference):
            return Truth(0, 0.0, 0.0)
        return Truth(len(difference), float(difference.abs().max()), float((difference.exp() - 1).abs().max()))

    def _minibatches(self, group_ids: Sequence[Any]) -> list[list[int]]:
        """Rows of each minibatch; the samples of one group stay together."""
        groups = sorted(set(group_ids))
        self._shuffle.shuffle(groups)
        parts = [set(groups[i :: self.settings.minibatches]) for i in range(self.settings.minibatches)]
        return [[row for row, group in enumerate(group_ids) if group in part] for part in parts if part]

    def _logprobs(self, batch: Batch) -> Tensor:
        logits = self.policy(batch.ids)[:, :-1] / self.settings.temperature
        return torch.log_softmax(logits, dim=-1).gather(2, batch.ids[:, 1:, None])[..., 0]

    def _loss(self, batch: Batch) -> Tensor:
        ratio = torch.exp((self._logprobs(batch) - batch.rollout_logprobs) * batch.mask)
        clipped = ratio.clamp(1 - self.settings.clip, 1 + self.settings.clip)
        advantages = batch.advantages[:, None]
        per_token = -torch.minimum(ratio * advantages, clipped * advantages) * batch.mask
        return (per_token.sum(1) / batch.group_mask_sums.clamp(min=1)).sum() / batch.groups


def collate(data: TrainData, rows: Sequence[int]) -> Batch:
    """Rows of train data as one right-padded batch. Raises ValueError where a response's lists differ in length."""
    longest = max(len(data["tokens"][row]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask, logprobs = torch.zeros(len(rows), longest - 1), torch.zeros(len(rows), longest - 1)
    for i, row in enumerate(rows):
        tokens, length = data["tokens"][row], data["response_lengths"][row]
        if not length == len(data["loss_masks"][row]) == len(data["rollout_log_probs"][row]):
            raise ValueError(
                f"sample {row}: response_length {length}, loss mask and rollout_log_probs differ in length"
            )
        ids[i, : len(tokens)] = torch.as_tensor(tokens)
        response = slice(len(tokens) - length - 1, len(tokens) - 1)
        mask[i, response] = torch.as_tensor(data["loss_masks"][row], dtype=torch.float)
        logprobs[i, response] = torch.as_tensor(data["rollout_log_probs"][row], dtype=torch.float)
    advantages = torch.tensor([float(data["rewards"][row]) for row in rows])
    sums = torch.tensor([float(data["group_mask_sums"][row]) for row in rows])
    return Batch(ids, mask, logprobs, advantages, sums, len({data["group_ids"][row] for row in rows}))
