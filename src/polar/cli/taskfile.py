"""A file of tasks, read whole and checked whole: every mistake is named by its line and field, and nothing of a file
with a mistake is ever submitted."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import yaml
from pydantic import ValidationError

from polar.config import wrong_fields
from polar.errors import ConfigError
from polar.requests import TaskRequest, ignored_fields

FORMATS = "JSONL (one task a line), YAML or JSON (one task, a list of tasks, or tasks: [...])"


class Mistake(msgspec.Struct, frozen=True):
    """`where` is a line, or which task it is; `field` a dotted path, empty where the whole entry is wrong."""

    where: str
    field: str
    problem: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.where, self.field, self.problem) if part)


class Entry(msgspec.Struct, frozen=True):
    """One task as it stands in the file."""

    where: str
    raw: Any


class TaskFileError(ConfigError):
    """Carries every mistake of the file; its message lists them, a line each."""

    def __init__(self, path: Path, mistakes: list[Mistake]) -> None:
        self.mistakes = mistakes
        count = "1 mistake" if len(mistakes) == 1 else f"{len(mistakes)} mistakes"
        listed = "".join(f"\n  {mistake}" for mistake in mistakes)
        super().__init__(f"{path} has {count}; nothing was submitted.{listed}")


class TaskFile(msgspec.Struct, frozen=True):
    """`warnings` name fields that no one reads, with the one that was probably meant."""

    tasks: list[TaskRequest]
    warnings: list[str]


def read_tasks(path: Path) -> TaskFile:
    """Raises TaskFileError, and ConfigError for a file that cannot be read."""
    entries, mistakes = _entries(path, _text(path))
    tasks: list[TaskRequest] = []
    warnings: list[str] = []
    first_use: dict[str, str] = {}
    for entry in entries:
        try:
            task = TaskRequest.model_validate(entry.raw)
        except ValidationError as error:
            mistakes += _mistakes(entry, error)
            continue
        if (earlier := first_use.setdefault(task.task_id, entry.where)) != entry.where:
            mistakes.append(Mistake(entry.where, "task_id", f"{task.task_id!r} is the id of {earlier} already"))
        tasks.append(task)
        warnings += [f"{entry.where}: {field} is ignored{_meant(field)}" for field in ignored_fields(entry.raw)]
    if mistakes:
        raise TaskFileError(path, mistakes)
    if not tasks:
        raise TaskFileError(path, [Mistake("", "", f"no task in it: write {FORMATS}")])
    return TaskFile(tasks, warnings)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _entries(path: Path, text: str) -> tuple[list[Entry], list[Mistake]]:
    match path.suffix.lower():
        case ".jsonl" | ".ndjson":
            return _jsonl(text)
        case ".json":
            return _json(text)
        case ".yaml" | ".yml":
            return _yaml(text)
        case _:
            raise ConfigError(f"{path}: name it .jsonl, .yaml or .json, so that its form is known. It holds {FORMATS}")


def _jsonl(text: str) -> tuple[list[Entry], list[Mistake]]:
    entries: list[Entry] = []
    mistakes: list[Mistake] = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            entries.append(Entry(f"line {number}", json.loads(line)))
        except json.JSONDecodeError as error:
            mistakes.append(Mistake(f"line {number}", "", f"not JSON: {error.msg} at column {error.colno}"))
    return entries, mistakes


def _json(text: str) -> tuple[list[Entry], list[Mistake]]:
    try:
        document = json.loads(text)
    except json.JSONDecodeError as error:
        hint = ". One task a line? Then name the file .jsonl" if error.msg == "Extra data" else ""
        return [], [Mistake(f"line {error.lineno}", "", f"not JSON: {error.msg}{hint}")]
    tasks = _task_list(document)
    return [Entry(f"task {number}", raw) for number, raw in enumerate(tasks, 1)], []


def _yaml(text: str) -> tuple[list[Entry], list[Mistake]]:
    try:
        tasks = _task_list(yaml.safe_load(text))
        lines = list(_yaml_lines(yaml.compose(text, yaml.SafeLoader)))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark else ""
        return [], [Mistake(where, "", f"not YAML: {getattr(error, 'problem', None) or error}")]
    return [Entry(f"line {line}", raw) for line, raw in zip(lines, tasks, strict=True)], []


def _task_list(document: Any) -> list[Any]:
    """An empty document has no task; anything that is neither list nor mapping is an entry that fails by name."""
    if document is None:
        return []
    if isinstance(document, dict) and isinstance(document.get("tasks"), list):
        document = document["tasks"]
    return document if isinstance(document, list) else [document]


def _yaml_lines(node: yaml.Node | None) -> Iterator[int]:
    """The line on which each entry of `_task_list` starts."""
    if isinstance(node, yaml.MappingNode):
        lists = [value for key, value in node.value if key.value == "tasks" and isinstance(value, yaml.SequenceNode)]
        node = lists[-1] if lists else node
    if isinstance(node, yaml.SequenceNode):
        yield from (item.start_mark.line + 1 for item in node.value)
    elif node is not None:
        yield node.start_mark.line + 1


def _mistakes(entry: Entry, error: ValidationError) -> list[Mistake]:
    if not isinstance(entry.raw, dict):
        return [Mistake(entry.where, "", f"a task is a mapping of fields, not {type(entry.raw).__name__}")]
    named = [(".".join(map(str, path)), problem) for path, problem in wrong_fields(error).mistakes]
    typos = {near: field for field in ignored_fields(entry.raw) if (near := _near(field))}
    return [
        Mistake(entry.where, field, f"{problem} (is {typos[field]!r} meant to be it?)" if field in typos else problem)
        for field, problem in named
    ]


def _near(field: str) -> str | None:
    """The top-level field that was probably meant."""
    close = difflib.get_close_matches(field, TaskRequest.model_fields, n=1, cutoff=0.75) if "." not in field else []
    return close[0] if close else None


def _meant(field: str) -> str:
    near = _near(field)
    return f": did you mean {near}?" if near else ": no task has such a field"
