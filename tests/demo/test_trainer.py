"""The trainer's numbers against numbers worked out by hand."""

from __future__ import annotations

import copy
from typing import Any

import pytest

pytest.importorskip("torch", reason="the reference trainer needs torch: install the extra 'demo'")
import torch

from polar_demo.policy import Policy, PolicyConfig
from polar_demo.trainer import Settings, Trainer, collate
from polar_demo.vocabulary import END, WORDS


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(PolicyConfig(len(WORDS), WORDS.index(END), max_position_embeddings=64)).eval()


def logprobs_of(policy: Policy, tokens: list[int], length: int, temperature: float = 1.0) -> list[float]:
    with torch.no_grad():
        logprobs = torch.log_softmax(policy(torch.tensor([tokens]))[0] / temperature, dim=-1)
    return [float(logprobs[place - 1, tokens[place]]) for place in range(len(tokens) - length, len(tokens))]


def data_of(policy: Policy, temperature: float = 1.0) -> dict[str, list[Any]]:
    """Three trajectories; the first has two traces. Masked places carry 0.0."""
    tokens = [[4, 9, 12, 30, 31], [4, 9, 40, 41, 42, 43, 44], [4, 8, 7], [5, 6, 7, 8, 9, 10]]
    masks = [[1, 1], [1, 0, 1], [1], [1, 1, 1, 1]]
    logprobs = [logprobs_of(policy, ids, len(mask), temperature) for ids, mask in zip(tokens, masks, strict=True)]
    logprobs[1][1] = 0.0
    return {
        "tokens": tokens,
        "response_lengths": [len(mask) for mask in masks],
        "loss_masks": masks,
        "rewards": [0.5, 0.5, -0.25, -0.75],
        "rollout_log_probs": logprobs,
        "group_ids": ["a", "a", "b", "c"],
        "group_mask_sums": [4, 4, 1, 4],
    }


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_recomputed_logprobs_are_the_recorded_ones(policy: Policy, temperature: float) -> None:
    trainer = Trainer(policy, Settings(temperature=temperature))
    truth = trainer.truth(data_of(policy, temperature))
    assert truth.tokens == 9
    assert truth.logprob_max_abs_diff < 1e-5
    assert truth.ratio_max_abs_gap < 1e-5


def test_a_wrong_logprob_is_seen(policy: Policy) -> None:
    data = data_of(policy)
    data["rollout_log_probs"][3][2] += 0.01
    truth = Trainer(policy, Settings()).truth(data)
    assert truth.logprob_max_abs_diff == pytest.approx(0.01, abs=1e-4)


def test_every_trajectory_counts_once(policy: Policy) -> None:
    """At ratio 1 the loss is the mean of −advantage over trajectories: their tokens' shares sum to 1."""
    data = data_of(policy)
    loss = Trainer(policy, Settings())._loss(collate(data, range(4)))
    assert loss.item() == pytest.approx(-(0.5 - 0.25 - 0.75) / 3, abs=1e-4)


def test_ratios_are_clipped_on_the_side_that_would_go_on(policy: Policy) -> None:
    data = {key: values[2:3] for key, values in data_of(policy).items()}
    recorded = data["rollout_log_probs"][0][0]
    for advantage, ratio, expected in ((1.0, 1.5, 1.2), (1.0, 0.5, 0.5), (-1.0, 0.5, -0.8), (-1.0, 1.5, -1.5)):
        data["rewards"] = [advantage]
        data["rollout_log_probs"] = [[recorded - float(torch.tensor(ratio).log())]]
        loss = Trainer(policy, Settings())._loss(collate(data, [0]))
        assert loss.item() == pytest.approx(-expected, abs=1e-4)


def test_minibatches_split_no_trajectory(policy: Policy) -> None:
    data = data_of(policy)
    for seed in range(8):
        parts = Trainer(policy, Settings(), seed=seed)._minibatches(data["group_ids"])
        assert sorted(row for part in parts for row in part) == [0, 1, 2, 3]
        assert sum({0, 1} <= set(part) for part in parts) == 1


def test_a_step_makes_what_was_good_likelier(policy: Policy) -> None:
    data = data_of(policy)
    before = copy.deepcopy(data["rollout_log_probs"])
    assert Trainer(policy, Settings(learning_rate=1e-3)).step(data)
    after = [logprobs_of(policy, ids, len(mask)) for ids, mask in zip(data["tokens"], data["loss_masks"], strict=True)]
    assert after[0][0] > before[0][0]
    assert sum(after[3]) < sum(before[3])


@pytest.mark.parametrize("change", [{"rewards": [0.0] * 4}, {"loss_masks": [[0, 0], [0, 0, 0], [0], [0] * 4]}])
def test_a_step_without_variance_changes_nothing(policy: Policy, change: dict[str, Any]) -> None:
    weights = copy.deepcopy(policy.state_dict())
    assert not Trainer(policy, Settings()).step(data_of(policy) | change)
    assert not Trainer(policy, Settings()).step({key: [] for key in data_of(policy)})
    assert all(torch.equal(policy.state_dict()[name], value) for name, value in weights.items())


def test_lists_of_different_lengths_are_refused(policy: Policy) -> None:
    data = data_of(policy)
    data["rollout_log_probs"][1] = data["rollout_log_probs"][1][:-1]
    with pytest.raises(ValueError, match="sample 1"):
        Trainer(policy, Settings()).step(data)
