"""`python -m polar_demo.warm_start FOLDER`: a policy that has read other people's transcripts.

Every demonstration is truthful, but few are what is asked for: most demonstrators recite the whole file where one
line was asked for, and some open another file first. So the policy can read and copy, and likes to say too much; what
earns a reward is left to reinforcement learning. The same seed and thread count give the same policy; nothing is
cached.
"""

from __future__ import annotations

import argparse
import math
import random
from pathlib import Path

import torch
from torch import Tensor

from polar_demo.policy import Policy, PolicyConfig
from polar_demo.tasks import look_up, tool_result
from polar_demo.vocabulary import ASSISTANT, END, WORDS, render, save_tokenizer, tokenizer

RECITE, OTHER_FILE = 0.75, 0.1  # shares of demonstrations
BATCH, LEARNING_RATE = 32, 2e-3
UNDERSTOOD, COOL_DOWN = 0.45, 80  # a loss between a plateau near 1 and the demonstrators' own 0.2; steps
MOST_STEPS = 1_000


def demonstration(rng: random.Random) -> list[dict[str, str]]:
    """A conversation: as the harness leads it, or as it leads it after forgetting how the file was opened."""
    task = look_up(rng.getrandbits(48))
    said = f"read {rng.choice(list(task.files))}" if rng.random() < OTHER_FILE else task.command
    result = tool_result(task.files, said)
    lines = [line.removesuffix(" ;") for line in result.splitlines()]
    lines.sort(key=lambda line: not line.startswith(f"{task.key} ="))  # the one asked for comes first
    answer = {"role": "assistant", "content": " ; ".join(lines if rng.random() < RECITE else lines[:1])}
    question, opened = {"role": "user", "content": task.instruction}, {"role": "assistant", "content": said}
    role = rng.choice(["tool", "tool", "user"])
    forgets = rng.random() < 0.4
    return [question, *([] if forgets else [opened]), {"role": role, "content": result}, answer]


def warm_start(seed: int) -> Policy:
    """A new policy that has learned what an assistant says, nothing else of the demonstrations.

    How soon copying is understood differs by seed: the loss falls, and only then the learning rate does.
    Raises RuntimeError where it is not understood within MOST_STEPS.
    """
    rng = random.Random(seed)
    torch.manual_seed(seed)
    policy = Policy(PolicyConfig(vocab_size=len(WORDS), eos_token_id=WORDS.index(END)))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=LEARNING_RATE)
    recent_loss, cooling = math.log(len(WORDS)), 0
    for _ in range(MOST_STEPS):
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * (1 - cooling / COOL_DOWN)
        ids, said = _batch(rng)
        logprobs = torch.log_softmax(policy(ids)[:, :-1], dim=-1).gather(2, ids[:, 1:, None])[..., 0]
        loss = -(logprobs * said[:, 1:]).sum() / said.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recent_loss += 0.1 * (loss.item() - recent_loss)
        cooling += bool(cooling) or recent_loss < UNDERSTOOD
        if cooling == COOL_DOWN:
            return policy.eval()
    raise RuntimeError(f"the demonstrations were not understood in {MOST_STEPS} steps: the loss is {recent_loss:.2f}")


def save(policy: Policy, folder: Path) -> None:
    """A whole checkpoint: config, weights, tokenizer and chat template."""
    policy.save(folder)
    save_tokenizer(folder)


def _batch(rng: random.Random) -> tuple[Tensor, Tensor]:
    """Right-padded ids [B, T], and which of them an assistant says (its `<end>` included)."""
    words = tokenizer()
    rows = [words.encode(render(demonstration(rng), add_generation_prompt=False)).ids for _ in range(BATCH)]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    return ids, torch.tensor([_said(row) + [0.0] * (longest - len(row)) for row in rows])


def _said(row: list[int]) -> list[float]:
    speaking, said = False, []
    for token in row:
        said.append(float(speaking))
        speaking = WORDS[token] == ASSISTANT or (speaking and WORDS[token] != END)
    return said


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m polar_demo.warm_start", description="The demo's supervised start")
    parser.add_argument("folder", type=Path, help="where the checkpoint is written")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    save(warm_start(args.seed), args.folder)


if __name__ == "__main__":
    main()
