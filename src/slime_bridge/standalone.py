"""Where Slime is absent: types with Slime's field names and defaults, and a data source that reads JSON lines.

What is written against these runs unchanged on Slime's own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from enum import Enum
from importlib import import_module
from pathlib import Path
from typing import Any

from polar.errors import ConfigError


@dataclass
class SpecInfo:
    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0


@dataclass
class PrefixCacheInfo:
    cached_tokens: int = 0
    total_prompt_tokens: int = 0


class Status(Enum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclass
class Sample:
    """One training sequence: `tokens` = prompt + response ids; mask and logprobs cover the last `response_length`."""

    group_index: int | None = None
    index: int | None = None
    group_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    rollout_routed_experts: list[list[int]] | None = None
    remove_sample: bool = False
    teacher_log_probs: list[float] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    def to_dict(self) -> dict[str, Any]:
        plain = {"status": self.status.value, "spec_info": vars(self.spec_info).copy()}
        return vars(self) | plain | {"prefix_cache_info": vars(self.prefix_cache_info).copy()}

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Sample:
        known = {item.name for item in fields(Sample)}
        made = {"status": Status(data["status"]), "spec_info": SpecInfo(**data.get("spec_info", {}))}
        made["prefix_cache_info"] = PrefixCacheInfo(**data.get("prefix_cache_info", {}))
        return Sample(**{key: value for key, value in (data | made).items() if key in known})


Sample.Status = Status  # type: ignore[attr-defined]


@dataclass
class RolloutFnTrainOutput:
    samples: list[list[Any]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def read_file(path: str) -> Iterator[dict[str, Any]]:
    """The rows of a JSON lines file. Raises ConfigError naming file and line."""
    if not path.endswith(".jsonl"):
        raise ConfigError(f"{path}: without Slime only .jsonl files can be read")
    try:
        lines = Path(path).read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigError(f"{path}, line {number}: not JSON: {error}") from error


class Prompts:
    """The prompts of a file; `shuffle(epoch)` is a pure function of seed and epoch."""

    def __init__(self, args: Any) -> None:
        self.seed = getattr(args, "rollout_seed", 42)
        self.origin_samples = [self._sample(args, row) for row in read_file(args.prompt_data)]
        self.samples = self.origin_samples

    @staticmethod
    def _sample(args: Any, row: dict[str, Any]) -> Sample:
        label_key = getattr(args, "label_key", None)
        return Sample(
            prompt=row[getattr(args, "input_key", "input")],
            label=row[label_key] if label_key else None,
            metadata=row.get(getattr(args, "metadata_key", "metadata")) or {},
        )

    def shuffle(self, epoch: int) -> None:
        order = list(range(len(self.origin_samples)))
        random.Random(self.seed + epoch).shuffle(order)
        self.samples = [self.origin_samples[position] for position in order]

    def __len__(self) -> int:
        return len(self.samples)


def pop_first(args: Any, rollout_id: int | None, buffer: list[list[Any]], num_samples: int) -> list[list[Any]]:
    """The buffer's first groups, which leave it: what a filter named by buffer_filter_path does in its own way."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def load_function(path: str) -> Any:
    """The object at `package.module.name`. Raises ConfigError where there is none."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"buffer_filter_path: cannot load {path!r}: {error}") from error


class RolloutDataSourceWithBuffer:
    """Prompt groups from a file; groups that were handed back are given out first."""

    def __init__(self, args: Any) -> None:
        if getattr(args, "apply_chat_template", False):
            raise ConfigError("apply_chat_template needs Slime and a tokenizer; without it a prompt is plain text")
        self.args = args
        self.epoch_id = 0
        self.sample_group_index = 0
        self.sample_index = 0
        self.sample_offset = 0
        self.metadata: dict[str, Any] = {}
        self.buffer: list[list[Any]] = []
        path = getattr(args, "buffer_filter_path", None)
        self.buffer_filter = pop_first if path is None else load_function(path)
        self.dataset = Prompts(args) if getattr(args, "prompt_data", None) else None
        if self.dataset is not None and getattr(args, "rollout_shuffle", False):
            self.dataset.shuffle(0)

    def _get_samples_from_buffer(self, num_samples: int) -> list[list[Any]]:
        return self.buffer_filter(self.args, None, self.buffer, num_samples) if self.buffer and num_samples else []

    def add_samples(self, samples: list[list[Any]]) -> None:
        wanted = self.args.n_samples_per_prompt
        for group in samples:
            if len(group) != wanted:
                raise ValueError(f"a group has {len(group)} samples; n_samples_per_prompt is {wanted}")
        self.buffer += samples

    def load(self, rollout_id: int | None = None) -> None:
        """Nothing to fall back on: only Slime's own source has an older state format."""
