"""What transformers computes for tokens that an engine has sampled: the trainer's side of a real engine.

Run with the Python of an engine's environment: recompute.py, and on stdin {model, dtype, temperature, sequences:
[[prompt ids, sampled ids], …]}. Prints the logprobs of the sampled ids, a list a sequence.
"""

from __future__ import annotations

import json
import sys

import torch
from transformers import AutoModelForCausalLM


def main() -> None:
    asked = json.load(sys.stdin)
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=getattr(torch, asked["dtype"])).eval()
    with torch.no_grad():
        told = [logprobs(model, prompt, sampled, asked["temperature"]) for prompt, sampled in asked["sequences"]]
    print(json.dumps(told))


def logprobs(model: torch.nn.Module, prompt: list[int], sampled: list[int], temperature: float) -> list[float]:
    logits = model(torch.tensor([prompt + sampled])).logits[0, len(prompt) - 1 : -1].float()
    return torch.log_softmax(logits / temperature, -1).gather(1, torch.tensor(sampled)[:, None])[:, 0].tolist()


if __name__ == "__main__":
    main()
