"""The bridge's settings, read from Slime's args, and the task a prompt group becomes. Every error names its key."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from polar.errors import ConfigError
from polar.requests import TaskRequest
from slime_bridge._messages import instruction_of, mistake_in
from slime_bridge.adapter import ConversionRules
from slime_bridge.keys import Keys
from slime_bridge.templates import render

TASK_ID = "polar-slime-{rollout_id}-{sample.group_index}"
KEYS = (
    "polar_rollout_url",
    "polar_topology_path",
    "polar_task_template",
    "polar_task_id_template",
    "polar_instruction_template",
    "polar_reward_key",
    "polar_max_async_level",
    "polar_prefetch",
    "polar_overlong",
    "polar_timeout_policy",
    "polar_single_survivor",
    "polar_request_timeout",
    "polar_callback_host",
    "polar_min_complete_accept_fraction",
    "polar_eval_dataset_name",
    "polar_task_timeout_floor",
    "polar_weight_update_pause_timeout",
    "polar_straggler_deadline",
    "polar_max_consecutive_drops",
    "polar_max_trajectory_tokens",
)
EXAMPLE = "e.g. {agent: {harness: mini_swe_agent}, evaluator: {strategy: command, config: {command: ./test.sh}}}"
ANY_ADDRESS = ("0.0.0.0", "::", "[::]")
_SAMPLING = {
    "temperature": "rollout_temperature",
    "top_p": "rollout_top_p",
    "top_k": "rollout_top_k",
    "max_tokens": "rollout_max_response_len",
    "stop": "rollout_stop",
    "stop_token_ids": "rollout_stop_token_ids",
}


@dataclass(frozen=True)
class PolarSlimeConfig:
    """All of it checked: see `resolve_polar_slime_config`."""

    rollout_url: str
    task_template: dict[str, Any]
    task_id_template: str
    instruction_template: str | None
    max_async_level: int
    prefetch: bool
    request_timeout: float
    callback_host: str
    min_complete_accept_fraction: float
    eval_dataset_name: str
    task_timeout_floor: float | None
    weight_update_pause_timeout: float
    straggler_deadline: float | None
    max_consecutive_drops: int
    rules: ConversionRules
    sampling: dict[str, Any]
    batch: int
    update_weights_interval: int

    @property
    def staleness_bound(self) -> int:
        """The oldest age, in rollouts, at which a group is still trained."""
        return self.max_async_level + self.update_weights_interval


def resolve_polar_slime_config(args: Any) -> PolarSlimeConfig:
    """Raises ConfigError listing every key that is wrong, and what it may be."""
    read = Keys(args)
    _refuse_unknown(args, read)
    template = read.mapping("polar_task_template", f"it is the task that each prompt becomes, {EXAMPLE}")
    if template and "agent" not in template:
        read.wrong.append(f"polar_task_template: agent is missing: say which harness runs, {EXAMPLE}")
    read.choice("polar_single_survivor", ("zero", "raw"))
    config = PolarSlimeConfig(
        rollout_url=_server_url(read),
        task_template=template,
        task_id_template=read.text("polar_task_id_template", TASK_ID),
        instruction_template=read.optional_text("polar_instruction_template"),
        max_async_level=read.count("polar_max_async_level", 2),
        prefetch=read.flag("polar_prefetch", False),
        request_timeout=read.seconds("polar_request_timeout", 60.0) or 60.0,
        callback_host=_callback_host(read),
        min_complete_accept_fraction=read.fraction("polar_min_complete_accept_fraction", 0.0),
        eval_dataset_name=read.text("polar_eval_dataset_name", "polar_eval"),
        task_timeout_floor=read.seconds("polar_task_timeout_floor", None),
        weight_update_pause_timeout=read.seconds("polar_weight_update_pause_timeout", 300.0) or 300.0,
        straggler_deadline=read.seconds("polar_straggler_deadline", None),
        max_consecutive_drops=read.count("polar_max_consecutive_drops", 64),
        rules=_rules(read),
        sampling=sampling_of(args, _SAMPLING),
        batch=read.count("rollout_batch_size", None),
        update_weights_interval=read.count("update_weights_interval", 1),
    )
    if read.wrong:
        raise ConfigError("; ".join(read.wrong))
    return config


def _refuse_unknown(args: Any, read: Keys) -> None:
    for name in sorted(vars(args)):
        if name.startswith("polar_") and name not in KEYS:
            close = difflib.get_close_matches(name, KEYS, n=1)
            read.wrong.append(f"{name}: there is no such key" + (f"; did you mean {close[0]}?" if close else ""))


def _callback_host(read: Keys) -> str:
    host = read.text("polar_callback_host", "127.0.0.1")
    if host in ANY_ADDRESS:
        read.wrong.append(f"polar_callback_host: {host} is no address the server can call; give this machine's own")
    elif "/" in host or _with_port(host):
        read.wrong.append(f"polar_callback_host: {host} is no bare host: give a name or an address, no URL and no port")
    return host


def _with_port(host: str) -> bool:
    """IPv6 has more colons than one."""
    return host.count(":") == 1


def sampling_of(settings: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling forced on every model call: sampling's name → the attribute of `settings` it comes from."""
    found = {name: getattr(settings, attribute, None) for name, attribute in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def task_payload(
    args: Any,
    config: PolarSlimeConfig,
    group: Sequence[Any],
    *,
    rollout_id: int,
    task_position: int,
    sampling: Mapping[str, Any] | None = None,
    **forced: Any,
) -> dict[str, Any]:
    """The TaskRequest of one group, as plain data. `forced` fields win over the template's; metadata is merged.

    Raises ConfigError naming the key and the group.
    """
    try:
        names = _names(args, group, rollout_id, task_position)
        payload = _rendered(config, group, names)
    except ConfigError as error:
        raise ConfigError(f"{error} (prompt group {group[0].group_index})") from error
    payload["num_samples"] = len(group)
    payload["sampling"] = {**(payload.get("sampling") or {}), **(config.sampling if sampling is None else sampling)}
    payload["metadata"] = {**(payload.get("metadata") or {}), **forced.pop("metadata", {})}
    if config.task_timeout_floor is not None:
        payload["timeout_seconds"] = max(float(payload.get("timeout_seconds") or 0.0), config.task_timeout_floor)
    return payload | forced


def _rendered(config: PolarSlimeConfig, group: Sequence[Any], names: dict[str, Any]) -> dict[str, Any]:
    if config.instruction_template is None or "{instruction}" in config.instruction_template:
        _check_is_text(group[0].prompt)
    if config.instruction_template is not None:
        names["instruction"] = str(render(config.instruction_template, names, "polar_instruction_template"))
    payload = render(config.task_template, names, "polar_task_template")
    payload["instruction"] = names["instruction"]
    payload["task_id"] = str(render(config.task_id_template, names, "polar_task_id_template"))
    return payload


def checked_request(payload: dict[str, Any]) -> TaskRequest:
    """Raises ConfigError naming the template's field."""
    try:
        return TaskRequest.model_validate(payload)
    except ValidationError as error:
        raise ConfigError("; ".join(_mistake(item["loc"], item["msg"]) for item in error.errors())) from error


def _mistake(loc: Sequence[int | str], message: str) -> str:
    path = ".".join(map(str, loc))
    key = {"task_id": "polar_task_id_template", "sampling": "Slime's rollout flags"}.get(path.split(".")[0])
    return f"{key or 'polar_task_template'}: {path}: {message}"


def render_topology_template(path: str | Path, args: Any) -> str:
    """The topology at `path` as YAML, its placeholders filled and its gateways pointed at Slime's SGLang router."""
    router = router_url(args)
    if router is None:
        raise ConfigError("sglang_router_ip and sglang_router_port are not set: the gateways need Slime's router")
    document = render(_topology(path), {"args": args, "sglang": {"router_base_url": router}}, "topology")
    for node in (document.get("gateway") or {}).get("nodes") or []:
        node["inference"] = {"engine": "sglang", **(node.get("inference") or {}), "base_url": router}
    return yaml.safe_dump(document, sort_keys=False)


def router_url(args: Any) -> str | None:
    host, port = getattr(args, "sglang_router_ip", None), getattr(args, "sglang_router_port", None)
    return f"http://{_in_url(host)}:{port}" if host and port else None


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host and not host.startswith("[") else host


def _names(args: Any, group: Sequence[Any], rollout_id: int, task_position: int) -> dict[str, Any]:
    sample = group[0]
    if (mistake := mistake_in(sample.prompt)) is not None:
        raise ConfigError(f"input_key: a prompt {mistake}")
    if not isinstance(sample.metadata or {}, Mapping):
        raise ConfigError(f"metadata_key: a prompt's metadata is {sample.metadata!r:.60}, no mapping")
    shown = ("prompt", "response", "label", "metadata", "index", "group_index")
    return {
        "args": args,
        "instruction": instruction_of(sample.prompt),
        "num_rollouts": len(group),
        "rollout_id": rollout_id,
        "sglang": {"router_base_url": router_url(args)},
        "sample": {name: getattr(sample, name) for name in shown} | {"status": sample.status.value},
        "task_position": task_position,
    }


def _check_is_text(prompt: Any) -> None:
    """An instruction is text: a picture in it would be dropped without a word."""
    for message in [] if isinstance(prompt, str) else prompt:
        content = message.get("content")
        for part in content if isinstance(content, list) else []:
            if not isinstance(part, str) and not isinstance(part.get("text"), str):
                raise ConfigError(
                    f"input_key: a prompt has a part of type {part.get('type')!r}, and an instruction is text; upload "
                    "it with runtime.prepare of polar_task_template, and say by polar_instruction_template where it is"
                )


def _server_url(read: Keys) -> str:
    """A topology that is not there is refused beside a URL too."""
    url, path = read.optional_text("polar_rollout_url"), read.optional_text("polar_topology_path")
    try:
        topology = None if path is None else _topology(path)
        if url is None and topology is not None:
            url = _topology_url(str(path), topology)
    except ConfigError as error:
        read.wrong.append(str(error))
        return ""
    if url is None:
        read.missing("polar_rollout_url", "the rollout server's address (or give polar_topology_path)")
        return ""
    if not url.startswith(("http://", "https://")):
        read.wrong.append(f"polar_rollout_url: {url!r} is no http address")
    return url.rstrip("/")


def _topology_url(path: str, topology: Mapping[str, Any]) -> str:
    rollout = topology.get("rollout") or {}
    if rollout.get("public_url"):
        return str(rollout["public_url"])
    host = str(rollout.get("host") or "127.0.0.1")
    if host in ANY_ADDRESS:
        raise ConfigError(f"polar_topology_path: {path}: rollout.host is {host}, no address to call; set public_url")
    return f"http://{_in_url(host)}:{rollout.get('port', 8080)}"


def _topology(path: str | Path) -> dict[str, Any]:
    try:
        document = yaml.safe_load(Path(path).read_text())
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"polar_topology_path: {path}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"polar_topology_path: {path} is no mapping")
    return document


def _rules(read: Keys) -> ConversionRules:
    cap = read.optional_count("polar_max_trajectory_tokens")
    per_gpu = read.optional_count("max_tokens_per_gpu")
    if cap is None and per_gpu is not None:
        cap = per_gpu * (read.optional_count("context_parallel_size") or 1)
    return ConversionRules(
        reward_keys=_reward_keys(read),
        timeout_policy=read.choice("polar_timeout_policy", ("mask", "truncate")),
        overlong=read.choice("polar_overlong", ("drop", "clip")),
        max_tokens=cap,
    )


def _reward_keys(read: Keys) -> tuple[str, ...]:
    """None where Slime reads a plain number; else the key it reads, and the bridge's own beside it."""
    slimes, own = read.optional_text("reward_key"), read.optional_text("polar_reward_key")
    return () if slimes is None else tuple(dict.fromkeys(key for key in (slimes, own) if key is not None))
