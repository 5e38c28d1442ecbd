"""Evaluation sets as Slime's args name them: groups in the file's order, numbered anew for each set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from polar.errors import ConfigError
from slime_bridge.config import PolarSlimeConfig, sampling_of
from slime_bridge.prompt_rows import RowKeys, row_mistake
from slime_bridge.slime_types import Sample, read_file

_SETTINGS = {
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "max_tokens": "max_response_len",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "min_tokens": "min_new_tokens",
    "repetition_penalty": "repetition_penalty",
}


@dataclass(frozen=True)
class Dataset:
    """`groups` [items][sessions of an item]; `sampling` is forced on every model call."""

    name: str
    groups: Sequence[list[Any]]
    sampling: Mapping[str, Any]


def datasets_of(args: Any, config: PolarSlimeConfig) -> list[Dataset]:
    """Slime's eval_datasets, else the pairs of name and path in eval_prompt_data (a lone path has the default name).

    Raises ConfigError for a file that is empty, whose rows cannot be used, and for a name that stands twice.
    """
    configured = getattr(args, "eval_datasets", None)
    named = [(each.name, each.path, each) for each in configured] if configured else _pairs(args, config)
    if len({name for name, _, _ in named}) < len(named):
        raise ConfigError(f"eval_datasets: a name stands twice in {', '.join(name for name, _, _ in named)}")
    return [_dataset(args, config, name, path, own) for name, path, own in named]


def _pairs(args: Any, config: PolarSlimeConfig) -> list[tuple[str, str, None]]:
    words = list(getattr(args, "eval_prompt_data", None) or [])
    if len(words) == 1:
        words = [config.eval_dataset_name, *words]
    if not words or len(words) % 2:
        raise ConfigError(f"eval_prompt_data: {words} is no list of name and path; name the sets to evaluate on")
    return [(name, path, None) for name, path in zip(words[::2], words[1::2], strict=True)]


def _dataset(args: Any, config: PolarSlimeConfig, name: str, path: str, own: Any) -> Dataset:
    def setting(key: str, default: Any = None) -> Any:
        for where, attribute in ((own, key), (args, f"eval_{key}"), (args, key)):
            if (found := getattr(where, attribute, None)) is not None:
                return found
        return default

    size = setting("n_samples_per_eval_prompt", 1)
    keys = RowKeys(setting("input_key", "input"), setting("label_key"), setting("metadata_key", "metadata"))
    overrides = getattr(own, "metadata_overrides", None) or {}
    groups = []
    for number, row in enumerate(read_file(path)):
        if (mistake := row_mistake(row, keys)) is not None:
            raise ConfigError(f"{path}, row {number + 1}: {mistake} (of the set {name})")
        prompt = Sample(
            group_index=number,
            prompt=row[keys.prompt],
            label=row[keys.label] if keys.label is not None else None,
            metadata={**(row.get(keys.metadata) or {}), **overrides},
        )
        groups.append([replace(prompt, index=number * size + offset) for offset in range(size)])
    if not groups:
        raise ConfigError(f"{path}: the evaluation set {name} has no items")
    of_all = {mine: f"eval_{attribute}" for mine, attribute in _SETTINGS.items()}
    return Dataset(name, groups, config.sampling | sampling_of(args, of_all) | sampling_of(own, _SETTINGS))
