"""A real engine process on a free port, with a randomly initialised policy: the truth needs no training."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from polar_demo.policy import Policy, PolicyConfig
from polar_demo.vocabulary import END, WORDS, save_tokenizer

CONTEXT = 2048


class Engine:
    """An engine's URL, and the policy that it is said to serve."""

    def __init__(self, url: str, folder: Path) -> None:
        self.folder, self.policy = folder, Policy.load(folder)
        self.http = httpx.Client(base_url=url, timeout=60)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else {}

    def generate(self, ids: list[int], rid: str | None = None, **sampling: Any) -> dict[str, Any]:
        body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}
        return self.post("/generate", body)

    def wait_for(self, running: int, within: float = 60.0) -> None:
        """Until so many requests run; fails behind `within` seconds."""
        deadline = time.monotonic() + within
        while self.get("/v1/loads")["loads"][0]["num_running_reqs"] != running:
            assert time.monotonic() < deadline, f"never {running} running requests"

    def get(self, path: str) -> dict[str, Any]:
        answer = self.http.get(path)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content else {}

    def events(self, path: str, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Server-sent events up to [DONE], which must come."""
        with self.http.stream("POST", path, json=body | {"stream": True}) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line == "data: [DONE]":
                    return
                if line:
                    yield json.loads(line.removeprefix("data: "))
        raise AssertionError("the stream ended without [DONE]")


def full_forward(policy: Policy, prompt: list[int], output: list[int], temperature: float) -> list[float]:
    """The logprobs that one pass over the whole sequence gives to the output."""
    with torch.no_grad():
        logits = policy(torch.tensor([prompt + output]))[0] / (temperature or 1.0)
    logprobs = torch.log_softmax(logits, dim=-1)[len(prompt) - 1 : -1]
    return logprobs.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


def save_random_policy(folder: Path, seed: int) -> Path:
    torch.manual_seed(seed)
    Policy(PolicyConfig(len(WORDS), WORDS.index(END), max_position_embeddings=CONTEXT)).save(folder)
    save_tokenizer(folder)
    return folder


@contextmanager
def engine_process(folder: Path, *options: str) -> Iterator[Engine]:
    command = [sys.executable, "-m", "polar.embedded", "--model", str(folder), "--port", "0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        try:
            assert line.startswith("listening on "), f"the engine did not start: {line!r}"
            yield Engine(line.split()[-1], folder)
        finally:
            process.terminate()
    assert process.returncode == 0
