"""The rows of a prompt file are looked at before the first task: one that no task can be made of is named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from polar.errors import ConfigError
from slime_bridge._messages import instruction_of, mistake_in
from slime_bridge.slime_types import read_file
from slime_bridge.templates import look_up, placeholders

TEMPLATES = ("polar_task_template", "polar_instruction_template", "polar_task_id_template")


@dataclass(frozen=True)
class RowKeys:
    """Under which keys a row has what. `label` None: it has none."""

    prompt: str
    label: str | None
    metadata: str


def check_prompts(args: Any) -> None:
    """Raises ConfigError naming the file and the first row that cannot be used."""
    keys = RowKeys(
        getattr(args, "input_key", None) or "input",
        getattr(args, "label_key", None),
        getattr(args, "metadata_key", None) or "metadata",
    )
    wanted, may_be_empty = _wanted_metadata(args), _without_instruction(args)
    for number, row in enumerate(_rows(args.prompt_data), 1):
        mistake = row_mistake(row, keys, may_be_empty=may_be_empty) or _unfilled(args, row, keys, wanted)
        if mistake is not None:
            raise ConfigError(f"prompt_data {args.prompt_data}, row {number}: {mistake}")


def row_mistake(row: Any, keys: RowKeys, *, may_be_empty: bool = False) -> str | None:
    """What keeps a task from being made of the row."""
    if not isinstance(row, Mapping):
        return f"{row!r:.60} is no mapping of keys"
    return _prompt_mistake(row, keys.prompt, may_be_empty) or _beside(row, keys)


def _prompt_mistake(row: Mapping[str, Any], key: str, may_be_empty: bool) -> str | None:
    fix = "--input-key says which key holds the prompt"
    if key not in row:
        return f"no {key!r} (it has {', '.join(map(str, row)) or 'nothing'}); {fix}"
    mistake = mistake_in(row[key])
    if mistake is None and not may_be_empty and not instruction_of(row[key]).strip():
        mistake = "is empty"
    return None if mistake is None else f"the prompt {key!r} {mistake}; {fix}"


def _beside(row: Mapping[str, Any], keys: RowKeys) -> str | None:
    if keys.label is not None and keys.label not in row:
        return f"no {keys.label!r} (it has {', '.join(map(str, row))}); --label-key says which key holds the label"
    metadata = row.get(keys.metadata) or {}
    if not isinstance(metadata, Mapping):
        return (
            f"its {keys.metadata!r} is {metadata!r:.60}, no mapping; --metadata-key says which key holds the metadata"
        )
    return None


def _rows(path: str) -> Iterator[Any]:
    try:
        yield from read_file(path)
    except (ConfigError, OSError, ValueError, ImportError) as error:
        raise ConfigError(f"prompt_data: {error}") from error


def _without_instruction(args: Any) -> bool:
    template = getattr(args, "polar_instruction_template", None)
    return isinstance(template, str) and "{instruction}" not in template


def _wanted_metadata(args: Any) -> dict[str, str]:
    """Placeholders that only a row's metadata can fill → the place that has them."""
    found = {path: where for key in TEMPLATES for path, where in placeholders(getattr(args, key, None), key)}
    return {path: where for path, where in found.items() if path.startswith("sample.metadata.")}


def _unfilled(args: Any, row: Mapping[str, Any], keys: RowKeys, wanted: Mapping[str, str]) -> str | None:
    """As Slime makes it, a sample's metadata has the tools of its row too."""
    tools = getattr(args, "tool_key", None)
    metadata = {
        **(row.get(keys.metadata) or {}),
        **({"tools": row[tools]} if tools is not None and tools in row else {}),
    }
    for path, where in wanted.items():
        try:
            look_up(path, {"sample": {"metadata": metadata}}, where)
        except ConfigError as error:
            return f"{error}; --metadata-key says which key holds the metadata"
    return None
