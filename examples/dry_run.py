"""What a Slime run with Polar would do, found out without starting anything: the bridge's settings as they resolve
from Slime's flags and the YAML file, its pre-flight, and the first task as the rollout server would take it.

    python examples/dry_run.py [--topology FILE] --prompt-data tasks.jsonl --custom-config-path polar.yaml …

Exit code 2, with what to do, where a run would be refused.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

try:
    import yaml

    from polar.config import load_topology
    from polar.errors import PolarError, TaskFault
    from polar.evaluators import load_evaluator
    from polar.harnesses import load_harness
    from polar.requests import TaskRequest, ignored_fields
    from polar.runtimes import load_runtime
    from slime_bridge.config import PolarSlimeConfig, checked_request, task_payload
    from slime_bridge.preflight import check_args, checked_config
    from slime_bridge.prompt_rows import check_prompts
    from slime_bridge.slime_types import Sample, read_file
except ModuleNotFoundError as missing:
    checkout = Path(__file__).resolve().parents[1]
    remedy = f"{sys.executable} -m pip install -e {checkout}, or name another Python by PYTHON=..."
    print(f"error: {sys.executable} has no module {missing.name}: {remedy}", file=sys.stderr)
    sys.exit(2)

SLIMES_DEFAULTS = {
    "prompt_data": None,
    "n_samples_per_prompt": 1,
    "input_key": "input",
    "label_key": None,
    "metadata_key": "metadata",
    "use_dynamic_batch_size": False,
    "rollout_temperature": 1.0,
    "rollout_top_p": 1.0,
    "rollout_top_k": -1,
    "context_parallel_size": 1,
}
"""of the flags that are read here"""
LONGEST = 600
"""characters of a text that are shown"""


def arguments(words: list[str]) -> SimpleNamespace:
    """Slime's args as far as they can be had without Slime: flags, then the keys of --custom-config-path.
    Raises PolarError for a word that belongs to no flag, or a YAML file that is none."""
    values: dict[str, list[Any]] = {}
    flag = None
    for word in words:
        if word.startswith("--"):
            flag = word[2:].replace("-", "_")
            values[flag] = []
        elif flag is None:
            raise TaskFault(f"{word!r} belongs to no flag")
        else:
            values[flag].append(_plain(word))
    flags = {name: _value(found) for name, found in values.items()}
    return SimpleNamespace(**(SLIMES_DEFAULTS | flags | _settings(flags.get("custom_config_path"))))


def _plain(word: str) -> Any:
    try:
        return yaml.safe_load(word)
    except yaml.YAMLError:
        return word


def _value(found: list[Any]) -> Any:
    return True if not found else found[0] if len(found) == 1 else found


def _settings(path: Any) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise TaskFault(f"--custom-config-path {path}: {error.strerror}") from error
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path}, line {mark.line + 1}" if mark else path
        problem = getattr(error, "problem", None) or getattr(error, "reason", None)
        raise TaskFault(f"{where}: not YAML: {problem}") from error
    except UnicodeDecodeError as error:
        raise TaskFault(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    if not isinstance(document, dict):
        raise TaskFault(f"{path} is no mapping of settings")
    return document


def first_task(args: Any, config: PolarSlimeConfig) -> tuple[TaskRequest, list[str]]:
    """The first prompt's task, its plug-ins made once, and the fields of it that no one reads. Raises PolarError."""
    if args.prompt_data is None:
        raise TaskFault("--prompt-data is missing: the file of prompts")
    check_prompts(args)
    row = next(iter(read_file(args.prompt_data)), None)
    if row is None:
        raise TaskFault(f"{args.prompt_data} has no prompts")
    sample = Sample(
        group_index=0,
        prompt=row[args.input_key],
        label=row[args.label_key] if args.label_key else None,
        metadata=row.get(args.metadata_key) or {},
    )
    payload = task_payload(args, config, [sample] * args.n_samples_per_prompt, rollout_id=0, task_position=0)
    request = checked_request(payload)
    load_harness(request.agent)
    if request.runtime is not None:
        load_runtime(request.runtime)
    if request.evaluator is not None:
        load_evaluator(request.evaluator)
    return request, ignored_fields(payload)


def missing_files(task: TaskRequest) -> Iterator[str]:
    """What the task takes from the gateway's host and this machine has not, each as `field: path`."""
    runtime = task.runtime
    wanted = [("agent.skills_path", task.agent.skills_path)]
    for name, actions in (("prepare", runtime.prepare), ("eval_prepare", runtime.eval_prepare)) if runtime else ():
        wanted += [(f"runtime.{name}.{at}.source", action.source) for at, action in enumerate(actions or [])]
    if runtime and not runtime.import_path:
        wanted.append(("runtime.image", runtime.image))
        wanted += [(f"runtime.kwargs.bind.{at}", path) for at, path in enumerate(runtime.kwargs.get("bind", []))]
    yield from (f"{field}: {path}" for field, path in wanted if path and not Path(path).exists())


def check_batches(args: Any) -> None:
    """Slime trains whole steps of global_batch_size trajectories, and drops what is left over without a word."""
    trajectories = args.rollout_batch_size * args.n_samples_per_prompt
    size = getattr(args, "global_batch_size", trajectories)
    if trajectories % size:
        raise TaskFault(f"global_batch_size {size} does not divide rollout_batch_size x n_samples: {trajectories}")


class Shown(yaml.SafeDumper):
    """Texts of several lines as such."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


Shown.add_representer(str, _text)


def shown(value: Any) -> Any:
    """Plain data, its long texts cut."""
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: shown(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown(inner) for inner in value]
    if isinstance(value, str) and len(value) > LONGEST:
        return f"{value[:LONGEST]}… ({len(value)} characters)"
    return value


def main(words: list[str]) -> int:
    try:
        args = arguments(words)
        config = checked_config(args)
        check_args(args)
        check_batches(args)
        task, ignored = first_task(args, config)
        topology = getattr(args, "topology", None) or getattr(args, "polar_topology_path", None)
        nodes = load_topology(topology).model_dump(exclude_defaults=True) if topology else None
    except (PolarError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    parts = {
        "settings": {name: value for name, value in asdict(config).items() if name != "task_template"},
        "topology": nodes,
        "first task": task.model_dump(exclude_defaults=True),
        "fields that no one reads": ignored,
    }
    for what in missing_files(task):
        print(f"warning: {what} is not on this machine; the gateway's host must have it", file=sys.stderr)
    for title, part in parts.items():
        if part:
            print(f"# {title}\n{yaml.dump(shown(part), Dumper=Shown, sort_keys=False, allow_unicode=True, width=120)}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
