"""The policy gives the same numbers however it is run, and its checkpoint is what an engine loads."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the small policy needs torch: install the extra 'demo'")
import torch

from polar.embedded.batch import Batch, Sequence
from polar.embedded.checkpoint import load_checkpoint
from polar.embedded.sampling import Sampling
from polar_demo.policy import Policy, PolicyConfig
from polar_demo.vocabulary import END, WORDS
from polar_demo.warm_start import save


@pytest.fixture
def policy() -> Policy:
    torch.manual_seed(0)
    return Policy(PolicyConfig(len(WORDS), WORDS.index(END), max_position_embeddings=256)).eval()


def test_prefill_and_decode_agree_with_forward_over_joining_and_leaving_rows(policy: Policy, tmp_path: Path) -> None:
    save(policy, tmp_path)
    batch, rng = Batch(load_checkpoint(str(tmp_path))), random.Random(0)
    done: list[Sequence] = []
    for _ in range(12):
        sequences = [_sequence(rng) for _ in range(rng.randint(0, 3))]
        if batch.sequences:
            batch.step()
        if sequences:
            batch.add(sequences)
        done += sequences
        batch.drop({sequence for sequence in batch.sequences if sequence.finish})
    assert len(done) > 10
    if batch.sequences:
        _run(batch, [_sequence(rng)])
    for sequence in done:
        ids = torch.tensor([sequence.prompt_ids + sequence.output_ids])
        with torch.no_grad():
            logprobs = torch.log_softmax(policy(ids)[0], dim=-1)[len(sequence.prompt_ids) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(sequence.output_ids)[:, None])[:, 0].tolist()
        assert sequence.logprobs == pytest.approx(expected, abs=1e-5)


def test_padding_on_the_right_changes_nothing(policy: Policy) -> None:
    ids = torch.randint(0, len(WORDS), (1, 20))
    padded = torch.cat([ids, torch.randint(0, len(WORDS), (1, 30))], dim=1)
    with torch.no_grad():
        assert torch.allclose(policy(ids), policy(padded)[:, :20], atol=1e-5)


def test_a_checkpoint_is_loaded_as_it_was_saved(policy: Policy, tmp_path: Path) -> None:
    policy.save(tmp_path / "step")
    again = Policy.load(tmp_path / "step")
    assert again.config == policy.config
    for name, weights in policy.state_dict().items():
        assert torch.equal(again.state_dict()[name], weights), name


def test_it_has_about_half_a_million_parameters(policy: Policy) -> None:
    assert 400_000 < sum(weights.numel() for weights in policy.parameters()) < 600_000


def _run(batch: Batch, sequences: list[Sequence]) -> None:
    batch.add(sequences)
    while batch.sequences:
        batch.drop({sequence for sequence in batch.sequences if sequence.finish})
        if batch.sequences:
            batch.step()


def _sequence(rng: random.Random) -> Sequence:
    prompt = [rng.randrange(len(WORDS)) for _ in range(rng.randint(1, 90))]
    sampling = Sampling(max_new_tokens=rng.randint(1, 6), ignore_eos=True)
    return Sequence(str(rng.random()), prompt, sampling, rng.getrandbits(63))
