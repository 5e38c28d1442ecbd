"""The sequences that run together, and one step of all of them.

Every sequence has its own row of the cache and its own length; padding is on the right and masked, so that a
sequence's logprobs are those of a full forward pass over it alone, whoever joins or leaves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from polar.embedded.checkpoint import Checkpoint, PolicyModel
from polar.embedded.sampling import Sampling, choose, logprobs_of, uniform

CACHE_GROWTH = 64  # places by which the cache is lengthened: copying it costs less than a millisecond
PREFILL_TOKENS = 16_384  # padded tokens of one prefill, which bounds its memory


@dataclass(eq=False)
class Sequence:
    """One request. The lists only grow, one entry a token, and only on the worker's thread."""

    rid: str
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    top_logprobs: int = 0
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[float, int]]] = field(default_factory=list)
    finish: dict[str, Any] | None = None

    def __len__(self) -> int:
        return len(self.prompt_ids) + len(self.output_ids)


class Batch:
    """Rows of the cache belong to `sequences` in order. No sequence is added twice; finished ones leave by `drop`."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint, self.policy = checkpoint, checkpoint.policy
        self.sequences: list[Sequence] = []
        self._cache: Tensor | None = None
        self._last_B_W = torch.empty(0)

    def use(self, policy: PolicyModel) -> None:
        """New weights. The cache of the old ones must have been emptied."""
        if self.sequences:
            raise ValueError("sequences still hold a cache of the old weights")
        self.policy = policy

    @torch.inference_mode()
    def add(self, sequences: list[Sequence]) -> None:
        """Run their prompts (and what they had sampled before), and choose one token for each."""
        for part in _parts(sorted(sequences, key=len)):
            ids = [sequence.prompt_ids + sequence.output_ids for sequence in part]
            lengths = torch.tensor([len(row) for row in ids])
            padded = torch.zeros(len(part), int(lengths.max()), dtype=torch.long)
            for row, own in zip(padded, ids, strict=True):
                row[: len(own)] = torch.tensor(own)
            logits, cache = self.policy.prefill(padded, lengths)
            window = self.policy.window
            last = torch.tensor([([0] * window + row)[-window:] for row in ids])
            self._join(part, cache, self._take(part, logits, last))

    @torch.inference_mode()
    def step(self) -> None:
        """Choose one token more for every sequence."""
        assert self._cache is not None
        positions = torch.tensor([len(sequence) - 1 for sequence in self.sequences])
        self._cache = _lengthen(self._cache, int(positions.max()) + 1)
        logits = self.policy.decode(self._last_B_W, positions, self._cache)
        self._last_B_W = self._take(self.sequences, logits, self._last_B_W)

    def drop(self, leaving: set[Sequence]) -> None:
        kept = [row for row, sequence in enumerate(self.sequences) if sequence not in leaving]
        if len(kept) == len(self.sequences):
            return
        self.sequences = [self.sequences[row] for row in kept]
        rows = torch.tensor(kept, dtype=torch.long)
        self._cache = self._cache.index_select(2, rows) if self._cache is not None and kept else None
        self._last_B_W = self._last_B_W[rows]

    def _join(self, sequences: list[Sequence], cache: Tensor, last_B_W: Tensor) -> None:
        if self._cache is None:
            self._cache, self._last_B_W = _lengthen(cache, cache.shape[4]), last_B_W
        else:
            places = max(cache.shape[4], self._cache.shape[4])
            self._cache = torch.cat([_lengthen(self._cache, places), _lengthen(cache, places)], dim=2)
            self._last_B_W = torch.cat([self._last_B_W, last_B_W])
        self.sequences += sequences

    def _take(self, sequences: list[Sequence], logits_B_V: Tensor, last_B_W: Tensor) -> Tensor:
        """Choose, note down, and give the windows behind the new tokens."""
        samplings = [sequence.sampling for sequence in sequences]
        logprobs = logprobs_of(logits_B_V, samplings)
        uniforms = [uniform(sequence.seed, len(sequence)) for sequence in sequences]
        chosen = choose(logprobs, samplings, uniforms, [self._barred(sequence) for sequence in sequences])
        most = max(sequence.top_logprobs for sequence in sequences)
        tops = logprobs.topk(most) if most else None
        its_logprobs = logprobs.gather(1, chosen[:, None])[:, 0].tolist()
        for row, (sequence, token, logprob) in enumerate(zip(sequences, chosen.tolist(), its_logprobs, strict=True)):
            if tops is not None and sequence.top_logprobs:
                pairs = zip(tops.values[row].tolist(), tops.indices[row].tolist(), strict=True)
                sequence.tops.append(list(pairs)[: sequence.top_logprobs])
            sequence.logprobs.append(logprob)
            sequence.output_ids.append(token)
            sequence.finish = self._finish(sequence)
        return torch.cat([last_B_W[:, 1:], chosen[:, None]], dim=1)

    def _ends(self, sequence: Sequence) -> set[int]:
        sampling = sequence.sampling
        return (set() if sampling.ignore_eos else set(self.checkpoint.eos_ids)) | set(sampling.stop_token_ids or [])

    def _barred(self, sequence: Sequence) -> list[int]:
        early = len(sequence.output_ids) < sequence.sampling.min_new_tokens
        return sorted(self._ends(sequence)) if early else []

    def _finish(self, sequence: Sequence) -> dict[str, Any] | None:
        token, sampling = sequence.output_ids[-1], sequence.sampling
        if token in self._ends(sequence):
            return {"type": "stop", "matched": token}
        if sampling.stop_strings and len(sequence.output_ids) >= sampling.min_new_tokens:
            text = self.checkpoint.decode(sequence.output_ids, skip_special_tokens=sampling.skip_special_tokens)
            for stop in sampling.stop_strings:
                if stop in text:
                    return {"type": "stop", "matched": stop}
        if len(sequence.output_ids) >= sampling.max_new_tokens:
            return {"type": "length", "length": sampling.max_new_tokens}
        return None


def _parts(sequences: list[Sequence]) -> Iterator[list[Sequence]]:
    """Sequences sorted by length, cut so that no part's padded size is above PREFILL_TOKENS (but for a single one)."""
    part: list[Sequence] = []
    for sequence in sequences:
        if part and (len(part) + 1) * len(sequence) > PREFILL_TOKENS:
            yield part
            part = []
        part.append(sequence)
    if part:
        yield part


def _lengthen(cache: Tensor, places: int) -> Tensor:
    """Room for at least so many places, in steps of CACHE_GROWTH."""
    wanted = -(-places // CACHE_GROWTH) * CACHE_GROWTH
    return cache if wanted <= cache.shape[4] else F.pad(cache, (0, 0, 0, wanted - cache.shape[4]))
