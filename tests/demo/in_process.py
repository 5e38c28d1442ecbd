"""Rollouts of the demo's task without the rest of Polar: the policy through the engine's own batch, in this process."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from polar.embedded.batch import Batch, Sequence
from polar.embedded.checkpoint import Checkpoint, load_checkpoint
from polar.embedded.sampling import Sampling
from polar_demo.policy import Policy
from polar_demo.tasks import LookUp, look_up, tool_result
from polar_demo.trainer import Settings, TrainData, Trainer, Truth
from polar_demo.vocabulary import render, tokenizer
from polar_demo.warm_start import save

KEYS = ("tokens", "response_lengths", "loss_masks", "rewards", "rollout_log_probs", "group_ids", "group_mask_sums")


@dataclass
class Session:
    """Two turns; `compacted` gives two traces, as a harness that forgets how it opened the file."""

    task: LookUp
    compacted: bool
    first: Sequence
    second: Sequence | None = None

    def traces(self) -> list[tuple[list[int], list[int], list[int], list[float]]]:
        """Prompt ids, response ids, mask, logprobs."""
        first, second = self.first, self.second
        assert second is not None
        whole = [_trace(turn) for turn in (first, second)]
        if self.compacted:
            return whole
        between = second.prompt_ids[len(first.prompt_ids) + len(first.output_ids) :]
        ids = first.output_ids + between + second.output_ids
        mask = whole[0][2] + [0] * len(between) + whole[1][2]
        return [(first.prompt_ids, ids, mask, first.logprobs + [0.0] * len(between) + second.logprobs)]

    def reward(self) -> float:
        assert self.second is not None
        return float(said(self.second) == self.task.answer)


def said(turn: Sequence) -> str:
    return tokenizer().decode(turn.output_ids)


def rollout(batch: Batch, rng: random.Random, prompts: int, samples: int, temperature: float = 1.0) -> list[Session]:
    """`prompts` × `samples` sessions, group by group; a quarter of them compacted."""
    sampling = Sampling(temperature=temperature, max_new_tokens=12)
    tasks = [task for _ in range(prompts) for task in [look_up(rng.getrandbits(48))] * samples]
    sessions = []
    for i, task in enumerate(tasks):
        prompt = _ids([_user(task)], generate=True)
        sessions.append(Session(task, rng.random() < 0.25, Sequence(f"{i}a", prompt, sampling, rng.getrandbits(63))))
    run(batch, [session.first for session in sessions])
    for i, session in enumerate(sessions):
        result = [{"role": "tool", "content": tool_result(session.task.files, said(session.first))}]
        before = session.first.prompt_ids + session.first.output_ids
        continued = before + _ids(result, generate=True)
        ids = _ids([_user(session.task), *result], generate=True) if session.compacted else continued
        session.second = Sequence(f"{i}b", ids, sampling, rng.getrandbits(63))
    run(batch, [session.second for session in sessions if session.second])
    return sessions


def run(batch: Batch, sequences: list[Sequence]) -> None:
    batch.add(sequences)
    while batch.sequences:
        batch.drop({sequence for sequence in batch.sequences if sequence.finish})
        if batch.sequences:
            batch.step()


def train_data(sessions: list[Session], samples: int) -> TrainData:
    """Leave-one-out advantages; groups without variance are left out."""
    data: dict[str, list[Any]] = {key: [] for key in KEYS}
    rewards = [session.reward() for session in sessions]
    for i, session in enumerate(sessions):
        group = rewards[i // samples * samples :][:samples]
        if len(set(group)) == 1:
            continue
        advantage = rewards[i] - (sum(group) - rewards[i]) / (samples - 1)
        traces = session.traces()
        mask_sum = sum(sum(mask) for _, _, mask, _ in traces)
        for prompt, ids, mask, logprobs in traces:
            row = (prompt + ids, len(ids), mask, advantage, logprobs, i, mask_sum)
            for key, value in zip(KEYS, row, strict=True):
                data[key].append(value)
    return data


def learn(
    policy: Policy, folder: Path, seed: int, steps: int, prompts: int, samples: int, settings: Settings
) -> tuple[list[float], Truth]:
    """Mean reward of every step, and how true the first step's logprobs were."""
    save(policy, folder)
    checkpoint: Checkpoint = load_checkpoint(str(folder))
    trainer, rng, curve, truths = Trainer(policy, settings, seed=seed), random.Random(seed), [], []
    for _ in range(steps):
        batch = Batch(checkpoint)
        batch.use(policy)
        sessions = rollout(batch, rng, prompts, samples)
        curve.append(sum(session.reward() for session in sessions) / len(sessions))
        data = train_data(sessions, samples)
        if data["tokens"]:
            truths.append(trainer.truth(data))
            trainer.step(data)
    return curve, truths[0]


def _trace(turn: Sequence) -> tuple[list[int], list[int], list[int], list[float]]:
    return turn.prompt_ids, turn.output_ids, [1] * len(turn.output_ids), turn.logprobs


def _user(task: LookUp) -> dict[str, str]:
    return {"role": "user", "content": task.instruction}


def _ids(messages: list[dict[str, str]], *, generate: bool) -> list[int]:
    return tokenizer().encode(render(messages, add_generation_prompt=generate)).ids
