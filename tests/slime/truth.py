"""What a trainer got, held against what the engine said: each check stands on the engine's own record alone."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import numpy as np
from tests.slime.closed_form import advantages
from tests.slime.world import BATCH, SESSIONS, World


@dataclass(frozen=True)
class Row:
    """One sample as a rank of the trainer has it."""

    index: int
    group: Any
    tokens: list[int]
    mask: list[int]
    logprobs: list[float]
    reward: float
    advantage: float
    mask_sum: float

    @property
    def prompt(self) -> list[int]:
        return self.tokens[: len(self.tokens) - len(self.mask)]

    @property
    def prompt_group(self) -> int:
        """The data source numbers samples through, a prompt's sessions one after another."""
        return self.index // SESSIONS


def rows_of(ranks: list[dict[str, Any]]) -> list[Row]:
    """All ranks' samples, each once, in the rollout's order."""
    found = {}
    for rank in ranks:
        names = (
            "sample_indices",
            "group_ids",
            "tokens",
            "loss_masks",
            "rollout_log_probs",
            "rewards",
            "group_mask_sums",
        )
        for at, (index, group, tokens, mask, logprobs, advantage, mask_sum) in zip(
            rank["partition"], zip(*(rank[name] for name in names), strict=True), strict=True
        ):
            assert at not in found, "two ranks have one sample"
            found[at] = Row(index, group, tokens, mask, logprobs, rank["raw_reward"][at], advantage, mask_sum)
        assert rank["response_lengths"] == [len(mask) for mask in rank["loss_masks"]]
        assert rank["global_batch_sizes"] == [SESSIONS * BATCH]
    assert sorted(found) == list(range(len(found)))
    return [found[at] for at in sorted(found)]


class Engine:
    """The engine's record. Every generation may be trained once."""

    def __init__(self, world: World) -> None:
        self._decode = world.decode
        self._said = {
            tuple(prompt) + tuple(number for number, _ in pairs): (len(prompt), [logprob for _, logprob in pairs])
            for prompt, pairs in world.sampled()
        }
        self._trained: set[tuple[int, ...]] = set()

    @property
    def generations(self) -> int:
        return len(self._said)

    def trained(self, row: Row) -> int:
        """Tokens of the row that are trained: each run of them is one whole answer to exactly what stands before it."""
        start, count = len(row.prompt), 0
        for first, end in _runs(row.mask):
            sequence = tuple(row.tokens[: start + end])
            length, logprobs = self._said[sequence]
            assert length == start + first, "an answer to another prompt"
            assert np.allclose(row.logprobs[first:end], logprobs, rtol=0, atol=0), (row.logprobs[first:end], logprobs)
            assert sequence not in self._trained, "trained twice"
            self._trained.add(sequence)
            count += end - first
        assert all(logprob == 0.0 for logprob, kept in zip(row.logprobs, row.mask, strict=True) if not kept)
        return count

    def last_number(self, row: Row) -> int:
        """N of the last "answer N" in the row."""
        return int(self._decode(row.tokens).rsplit("answer ", 1)[1].split("<|im_end|>")[0])


def _runs(mask: list[int]) -> list[tuple[int, int]]:
    edges = np.flatnonzero(np.diff([0, *mask, 0]))
    return list(zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True))


def check_weights(rows: list[Row]) -> None:
    """All samples of a trajectory, and only they, share one grouping id and the sum of their masks."""
    by_group: dict[Any, list[Row]] = defaultdict(list)
    for row in rows:
        by_group[row.group].append(row)
    for members in by_group.values():
        assert len({row.index for row in members}) == 1
        assert len({row.reward for row in members}) == 1
        assert {row.mask_sum for row in members} == {sum(sum(row.mask) for row in members)}
    assert len(by_group) == len({row.index for row in rows})


def check_advantages(rows: list[Row]) -> None:
    """As v0.3.0 and later shape by default: with the standard deviation."""
    rewards: dict[int, dict[Any, float]] = defaultdict(dict)
    for row in rows:
        if any(row.mask):
            rewards[row.prompt_group][row.index] = row.reward
    expected = {index: value for group in rewards.values() for index, value in advantages(group, std=True).items()}
    for row in rows:
        assert math.isclose(row.advantage, expected.get(row.index, 0.0), rel_tol=1e-5, abs_tol=1e-6), row
