"""How the next token is chosen.

The logprob of a token is log_softmax(logits / temperature) before top_k and top_p cut anything, which is what a
trainer can recompute. The random number of a token is a function of the request's seed and of the token's place in
the sequence: the neighbours in a batch don't matter, and a request that was aborted and continued from its ids
samples what it would have.
"""

from __future__ import annotations

import hashlib
import struct
from typing import Annotated, Any

import torch
from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field
from torch import Tensor


def _one_only(n: int | None) -> int | None:
    if n not in (None, 1):
        raise ValueError("one answer a request; send more requests instead")
    return n


def _every_or_some(top_k: int) -> int:
    if top_k != -1 and top_k < 1:
        raise ValueError("must be -1 (no limit) or at least 1")
    return top_k


def _none(value: Any) -> None:
    if value not in (None, 0, {}, ""):
        raise ValueError("is not honoured by this engine: leave it out")


def _no_penalty(value: Any) -> None:
    if value not in (None, 1):
        raise ValueError("is not honoured by this engine: leave it out, or 1")


Absent = Annotated[None, BeforeValidator(_none)]


class Sampling(BaseModel):
    """SGLang's sampling_params, as far as honoured. Temperature 0 is greedy, with logprobs at temperature 1."""

    model_config = ConfigDict(allow_inf_nan=False)

    min_p: Absent = None
    frequency_penalty: Absent = None
    presence_penalty: Absent = None
    repetition_penalty: Annotated[None, BeforeValidator(_no_penalty)] = None
    logit_bias: Absent = None
    json_schema: Absent = None
    regex: Absent = None
    ebnf: Absent = None
    structural_tag: Absent = None

    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: Annotated[int, AfterValidator(_every_or_some)] = -1
    max_new_tokens: int = Field(default=128, ge=1)
    min_new_tokens: int = Field(default=0, ge=0)
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    seed: int | None = Field(default=None, ge=0, lt=2**64, validation_alias=AliasChoices("sampling_seed", "seed"))
    n: Annotated[int | None, AfterValidator(_one_only)] = None

    @property
    def stop_strings(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def restricts(self) -> bool:
        return self.top_p < 1 or self.top_k != -1


def uniform(seed: int, position: int) -> float:
    """The number in [0, 1) that decides the token at this place of the sequence."""
    digest = hashlib.blake2b(struct.pack("<QQ", seed, position), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / 2**53


def logprobs_of(logits_B_V: Tensor, samplings: list[Sampling]) -> Tensor:
    temperatures = torch.tensor([sampling.temperature or 1.0 for sampling in samplings])
    return torch.log_softmax(logits_B_V / temperatures[:, None], dim=-1)


def choose(logprobs_B_V: Tensor, samplings: list[Sampling], uniforms: list[float], barred: list[list[int]]) -> Tensor:
    """Ids [B]. `barred` holds, a sequence, the ids that may not be chosen yet (min_new_tokens)."""
    weights = logprobs_B_V.double().exp()
    for row, sampling in enumerate(samplings):
        if barred[row]:
            weights[row, barred[row]] = 0.0
        if sampling.restricts:
            weights[row] = _restrict(weights[row], sampling)
    ends = weights.cumsum(dim=-1)
    points = torch.tensor(uniforms, dtype=torch.double)[:, None] * ends[:, -1:]
    sampled = torch.searchsorted(ends, points, right=True)[:, 0].clamp(max=weights.shape[1] - 1)
    greedy = torch.tensor([sampling.temperature == 0 for sampling in samplings])
    return torch.where(greedy, weights.argmax(dim=-1), sampled)


def _restrict(weights_V: Tensor, sampling: Sampling) -> Tensor:
    """Only the top_k likeliest, and of these the fewest whose probabilities sum to top_p."""
    ordered, ids = weights_V.sort(descending=True)
    if sampling.top_k != -1:
        ordered[sampling.top_k :] = 0.0
    before = ordered.cumsum(dim=-1) - ordered
    ordered[before >= sampling.top_p * ordered.sum()] = 0.0
    return torch.zeros_like(weights_V).scatter(0, ids, ordered)
