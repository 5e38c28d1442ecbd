"""Rollouts by the four hooks, called as Slime calls them: by class, synchronously, on flat samples."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

from polar_demo import agent
from polar_demo.tasks import look_up
from slime_bridge.data_source import CeilEpochRolloutDataSourceWithBuffer
from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.rollout import generate_rollout_polar_async
from slime_bridge.slime_types import RolloutFnTrainOutput, trajectory_of

PROMPTS = 512
COMPACTED = 8
"""one task in so many has an agent that compacts its history: two traces a session"""
_PYTHON = Path(sys.base_prefix)


def write_prompts(path: Path, seed: int) -> None:
    """Slime's prompt data: input, label, metadata."""
    tasks = [look_up(seed * PROMPTS + number) for number in range(PROMPTS)]
    with path.open("w") as file:
        for number, task in enumerate(tasks):
            world = json.dumps({"files": task.files, "compact": number % COMPACTED == 0})
            row = {"input": task.instruction, "label": task.answer, "metadata": {"world": world}}
            file.write(json.dumps(row) + "\n")


def shell_template() -> dict[str, Any]:
    """The agent is a script that is put into the sandbox and run there by the Python of this machine."""
    python = Path(sys.executable).resolve()
    upload = [
        {"type": "upload_file", "content": "{args.agent_source}", "target": "/session/agent.py"},
        {"type": "upload_file", "content": "{sample.metadata.world}", "target": "/session/world.json"},
    ]
    return {
        "agent": {"harness": "shell", "custom_shell": {"command": f"exec {python} -I -S /session/agent.py"}},
        "runtime": {"prepare": upload, "kwargs": {"bind": [] if Path("/usr") == _PYTHON else [str(_PYTHON)]}},
        "evaluator": {
            "strategy": "command",
            "config": {"command": 'grep -qxF "$RIGHT" "$ARTIFACTS_DIR/answer.txt"'},
            "env": {"RIGHT": "{sample.label}"},
        },
        "timeout_seconds": 60,
    }


def mini_swe_agent_template(mini: Path) -> dict[str, Any]:
    """The real mini-swe-agent; the small policy knows next to none of its words, so nothing is learned from it."""
    return {
        "agent": {"harness": "mini_swe_agent", "settings": {"command": str(mini), "step_limit": 3}},
        "runtime": {"kwargs": {"bind": [str(_PYTHON), str(mini.parent.parent)]}},
        "evaluator": {"strategy": "command", "config": {"command": 'test -s "$ARTIFACTS_DIR/answer.txt"'}},
        "timeout_seconds": 120,
    }


def slime_args(
    url: str, engine_url: str, prompts: Path, template: dict[str, Any], *, groups: int, samples: int, max_tokens: int
) -> Namespace:
    """The attributes that Slime's command line would have set."""
    host, port = engine_url.removeprefix("http://").split(":")
    return Namespace(
        prompt_data=str(prompts),
        input_key="input",
        label_key="label",
        metadata_key="metadata",
        rollout_batch_size=groups,
        n_samples_per_prompt=samples,
        global_batch_size=groups * samples,
        rollout_temperature=1.0,
        rollout_top_p=1.0,
        rollout_max_response_len=max_tokens,
        advantage_estimator="grpo",
        grpo_std_normalization=False,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16384,
        update_weights_interval=1,
        sglang_router_ip=host,
        sglang_router_port=int(port),
        agent_source=Path(agent.__file__).read_text(),
        polar_rollout_url=url,
        polar_task_template=template,
        polar_max_async_level=1,
    )


class Rollouts:
    """Slime's side of the hooks. `take` is one rollout: flat samples as train data, and the bridge's metrics."""

    def __init__(self, args: Namespace) -> None:
        self.args = args
        self.data_source = CeilEpochRolloutDataSourceWithBuffer(args)

    def take(self, rollout_id: int) -> tuple[dict[str, Any], dict[str, float]]:
        output = generate_rollout_polar_async(self.args, rollout_id, self.data_source, evaluation=False)
        assert isinstance(output, RolloutFnTrainOutput)
        flat = [sample for group in output.samples for trajectory in group for sample in trajectory]
        raw, shaped = post_process_rewards(self.args, flat)
        return train_data(flat, raw, shaped), output.metrics or {}


def train_data(flat: list[Any], raw: list[float], shaped: list[float]) -> dict[str, Any]:
    """Slime's columns. Every sample of a trajectory has the trajectory's number of trainable tokens as its divisor."""
    masks = [[0] * sample.response_length if sample.remove_sample else sample.loss_mask for sample in flat]
    groups = [trajectory_of(sample) for sample in flat]
    sums = dict.fromkeys(groups, 0)
    for group, mask in zip(groups, masks, strict=True):
        sums[group] += sum(mask)
    return {
        "tokens": [sample.tokens for sample in flat],
        "response_lengths": [sample.response_length for sample in flat],
        "raw_reward": raw,
        "rewards": shaped,
        "loss_masks": masks,
        "rollout_log_probs": [sample.rollout_log_probs for sample in flat],
        "group_ids": groups,
        "group_mask_sums": [sums[group] for group in groups],
    }
