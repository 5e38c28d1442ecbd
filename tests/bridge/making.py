"""Results as a rollout server hands them out, and the prompt groups they belong to."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from polar.endings import TABLE
from polar.records import SessionResult, TaskResult, TaskState, Termination, Trace, Trajectory
from slime_bridge.slime_types import Sample


def trace(
    *,
    prompt: int = 3,
    mask: tuple[int, ...] = (1, 1, 0, 1),
    reward: float | None = 1.0,
    logprobs: list[float] | str | None = "aligned",
    versions: list[tuple[int, int, str]] | None = None,
    finish: str | None = "stop",
) -> Trace:
    length = len(mask)
    aligned = np.array([-0.5 if trained else 0.0 for trained in mask], np.float32)
    return Trace(
        prompt_ids=np.arange(100, 100 + prompt),
        response_ids=np.arange(200, 200 + length),
        loss_mask=np.array(mask),
        prompt_messages=[{"role": "user", "content": "find it"}],
        response_messages=[
            {
                "role": "assistant",
                "content": "looking",
                "tool_calls": [{"function": {"name": "ls", "arguments": "{}"}}],
            },
            {"role": "tool", "content": "a.txt"},
            {"role": "assistant", "content": "found"},
        ],
        finish_reason=finish,
        response_logprobs=aligned if isinstance(logprobs, str) else logprobs,
        reward=reward,
        weight_versions=[(0, length, "1")] if versions is None else versions,
    )


def session(index: int, *traces: Trace, termination: Termination = Termination.DONE, **changed: Any) -> SessionResult:
    status = TABLE[termination].status
    trainable = sum(each.trainable for each in traces)
    tokens = {"sampled": trainable + 2, "trainable": trainable, "excluded": {"aborted": 2}, "attempt_discarded": 0}
    trajectory = Trajectory(status=status, traces=list(traces), metadata={"tokens": tokens, "calls": {"drift": 0}})
    fields: dict[str, Any] = {
        "session_id": f"session-{index}",
        "task_id": "task",
        "status": status,
        "trajectory": trajectory,
        "metadata": {"session_index": index, "termination": termination.value, "attempt": 1},
    }
    return SessionResult(**(fields | changed))


def task(*sessions: SessionResult, status: TaskState = TaskState.COMPLETED) -> TaskResult:
    return TaskResult(task_id="task", status=status, results=list(sessions))


def group(size: int, *, group_index: int = 0, first: int = 0, prompt: Any = "do it") -> list[Any]:
    return [
        Sample(group_index=group_index, index=first + offset, prompt=prompt, label="42", metadata={"source": "set"})
        for offset in range(size)
    ]


DATA_SOURCE = {
    "rollout_global_dataset": True,
    "rollout_shuffle": False,
    "rollout_seed": 7,
    "input_key": "input",
    "label_key": None,
    "metadata_key": "metadata",
    "tool_key": None,
    "multimodal_keys": None,
    "apply_chat_template": False,
    "apply_chat_template_kwargs": None,
    "rollout_max_prompt_len": None,
    "dump_details": None,
    "buffer_filter_path": None,
    "chat_template_path": None,
}
"""What Slime's own data source reads of args, beside what a test sets."""


@cache
def checkpoint() -> str | None:
    """A folder with a tokenizer of one word, where Slime's data source wants one; None without Slime."""
    if not Sample.__module__.startswith("slime."):
        return None
    folder = Path(tempfile.mkdtemp(prefix="polar-test-checkpoint-"))
    Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (folder / "config.json").write_text('{"model_type": "qwen3"}')
    return str(folder)


def arguments(**changed: Any) -> SimpleNamespace:
    """The args that Slime's hooks see, as far as the bridge reads them."""
    base: dict[str, Any] = {
        "polar_rollout_url": "http://127.0.0.1:1",
        "polar_task_template": {
            "agent": {"harness": "shell", "custom_shell": {"command": "true"}},
            "evaluator": {"strategy": "session_completed"},
            "timeout_seconds": 60.0,
        },
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 4096,
        "reward_key": None,
        "rollout_temperature": 1.0,
        "rollout_top_p": 1.0,
        "rollout_top_k": -1,
        "rollout_max_response_len": 16,
        "rollout_stop": None,
        "rollout_stop_token_ids": [9],
    }
    return SimpleNamespace(**(DATA_SOURCE | {"hf_checkpoint": checkpoint()} | base | changed))
