"""All that a run of the real Slime stands in: a scripted engine, `polar serve` before it with a real harness in real
sandboxes, prompts, and the words of Slime's command line. Only the engine is scripted.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from tests.chain import Chain, polar_serve
from tests.peers.engine import ScriptedEngine, scripted_engine
from tests.peers.tokenizer import make_tokenizer
from tokenizers import Tokenizer

PROMPTS, BATCH, SESSIONS = 10, 4, 4
HARD = {2, 5, 8}
"""Prompts whose session 2 makes no call; session 1 always asks a helper too."""
CHECK = 'grep -q "[13579]$" "$ARTIFACTS_DIR/answer.txt"'
HOOKS = {
    "rollout-function-path": "slime_bridge.rollout.generate_rollout_polar_async",
    "custom-rm-path": "slime_bridge.reward.reward_func",
    "custom-reward-post-process-path": "slime_bridge.reward_post_process.post_process_rewards",
    "data-source-path": "slime_bridge.data_source.CeilEpochRolloutDataSourceWithBuffer",
}
FLAGS: dict[str, Any] = {
    "input-key": "input",
    "label-key": "label",
    "rollout-batch-size": BATCH,
    "n-samples-per-prompt": SESSIONS,
    "global-batch-size": BATCH * SESSIONS,
    "num-rollout": 3,
    "rollout-num-gpus": 1,
    "rollout-num-gpus-per-engine": 1,
    "num-gpus-per-node": 1,
    "actor-num-gpus-per-node": 1,
    "rollout-max-response-len": 64,
    "use-dynamic-batch-size": None,
    "max-tokens-per-gpu": 512,
    "advantage-estimator": "grpo",
    "eval-interval": 2,
    "n-samples-per-eval-prompt": 2,
    "use-tensorboard": None,
    "tb-project-name": "polar",
    "tb-experiment-name": "run",
}


class World:
    def __init__(self, folder: Path, engine: ScriptedEngine, chain: Chain, checkpoint: Path) -> None:
        self.folder, self.engine, self.chain, self.checkpoint = folder, engine, chain, checkpoint
        self.decode = partial(Tokenizer.from_file(str(checkpoint / "tokenizer.json")).decode, skip_special_tokens=False)
        rows = [
            {"input": f"task {number}{' hard' if number in HARD else ''}", "label": str(number)}
            for number in range(PROMPTS)
        ]
        self._write("prompts.jsonl", rows)
        self._write("eval.jsonl", [{"input": f"held out {number}", "label": "1"} for number in range(2)])

    def _write(self, name: str, rows: list[dict[str, Any]]) -> None:
        (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))

    def flags(self, *, save: Path, **changed: Any) -> list[str]:
        """Slime's command line; None is a switch, False leaves a flag out."""
        router, port = self.engine.url.removeprefix("http://").split(":")
        placeholder = self.folder / "sglang.yaml"
        group = {"worker_type": "placeholder", "num_gpus": 1}
        placeholder.write_text(yaml.safe_dump({"sglang": [{"name": "default", "server_groups": [group]}]}))
        words = HOOKS | FLAGS
        words |= {
            "hf-checkpoint": self.checkpoint,
            "ref-load": self.checkpoint,
            "prompt-data": self.folder / "prompts.jsonl",
            "sglang-router-ip": router,
            "sglang-router-port": port,
            "sglang-config": placeholder,
            "save": save,
            "save-debug-rollout-data": save / "debug_{rollout_id}.pt",
            "custom-config-path": self._settings(save, changed.pop("polar", {})),
        }
        words |= {name.replace("_", "-"): value for name, value in changed.items()}
        told = [
            [f"--{name}", *([] if value is None else [str(value)])]
            for name, value in words.items()
            if value is not False
        ]
        evaluated = ["--eval-prompt-data", "held_out", str(self.folder / "eval.jsonl")]
        return [word for pair in told for word in pair] + evaluated

    def _settings(self, save: Path, changed: dict[str, Any]) -> Path:
        agent = Path(__file__).with_name("agent.py").read_text()
        upload = {"type": "upload_file", "target": "/session/agent.py", "content": agent}
        document = {
            "polar_rollout_url": self.chain.url,
            "polar_task_template": {
                "agent": {"harness": "shell", "custom_shell": {"command": "python3 /session/agent.py"}},
                "runtime": {"prepare": [upload]},
                "evaluator": {"strategy": "command", "config": {"command": CHECK}},
                "timeout_seconds": 120.0,
            },
        }
        save.mkdir(parents=True, exist_ok=True)
        path = save / "polar.yaml"
        path.write_text(yaml.safe_dump(document | changed))
        return path

    def sampled(self) -> list[tuple[list[int], list[tuple[int, float]]]]:
        """What the engine said to harnesses: (prompt, ids with their logprobs)."""
        return [(prompt, said) for prompt, said in self.engine.sampled if len(prompt) > 1]

    def left(self) -> list[str]:
        """Tasks on the server that have not ended."""
        told = self.chain.http.get("/tasks", params={"limit": 1000}).json()["tasks"]
        return [task["task_id"] for task in told if task["status"] in ("running", "cancelling")]


@contextlib.contextmanager
def a_world(folder: Path) -> Iterator[World]:
    checkpoint = make_tokenizer(folder / "checkpoint")
    config = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "hidden_size": 32, "num_hidden_layers": 2}
    (checkpoint / "config.json").write_text(json.dumps(config | {"num_attention_heads": 2, "vocab_size": 512}))
    workers = ["--init-workers", "4", "--run-workers", "4"]
    with (
        scripted_engine(checkpoint, numbered=True) as engine,
        polar_serve(
            folder / "data", engine.url, "--engine", "sglang", "--tokenizer", str(checkpoint), *workers
        ) as chain,
    ):
        yield World(folder, engine, chain, checkpoint)
