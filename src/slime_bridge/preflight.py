"""Wrong settings are found before the first task, and the message says the fix. Nothing is silently not honoured."""

from __future__ import annotations

from typing import Any

from polar.client import AsyncClient, ClientError
from polar.errors import ConfigError
from slime_bridge.config import PolarSlimeConfig
from slime_bridge.slime_types import wants_nucleus_ids

REFUSED_SWITCHES = {
    "calculate_per_token_loss": "it ignores the grouping ids, so a trajectory of many traces would count many times",
    "log_passrate": "it wants exactly one sample a session, and a session may give several traces",
    "partial_rollout": "the proxy continues aborted calls by itself",
    "multimodal_keys": "images reach the harness, but no trace carries their features",
}
REFUSED_HOOKS = {
    "dynamic_sampling_filter_path": "Polar drops groups by the rules of polar_min_complete_accept_fraction",
    "rollout_sample_filter_path": "only Slime's own rollout function calls it",
    "rollout_all_samples_process_path": "only Slime's own rollout function calls it",
    "rollout_sample_hook_path": "only Slime's own rollout function calls it",
    "custom_generate_function_path": "the harness is the generate function",
}


def check_args(args: Any, config: PolarSlimeConfig) -> None:
    """Raises ConfigError listing everything that is wrong, each with what to do."""
    wrong = [
        *_task_mistakes(config),
        *_refused(args),
        *_batch_mistakes(args),
        *_sampling_mistakes(args),
        *_colocation_mistakes(args, config),
    ]
    if wrong:
        raise ConfigError("; ".join(wrong))


def _task_mistakes(config: PolarSlimeConfig) -> list[str]:
    if config.task_template.get("evaluator"):
        return []
    return ["polar_task_template: evaluator is missing, so no session would have a reward; e.g. {strategy: command}"]


def _refused(args: Any) -> list[str]:
    given = {**REFUSED_SWITCHES, **REFUSED_HOOKS}
    return [f"{name} is not supported: {why}; leave it out" for name, why in given.items() if getattr(args, name, None)]


def _batch_mistakes(args: Any) -> list[str]:
    wrong = []
    if getattr(args, "use_dynamic_batch_size", None) is False:
        wrong.append(
            "use_dynamic_batch_size is off: a session may give several traces, and static micro-batches cannot take "
            "them; set --use-dynamic-batch-size and --max-tokens-per-gpu"
        )
    more = getattr(args, "over_sampling_batch_size", None)
    if more is not None and more != args.rollout_batch_size:
        wrong.append("over_sampling_batch_size is not supported: polar_max_async_level says how far ahead rollouts run")
    return wrong


def _sampling_mistakes(args: Any) -> list[str]:
    if wants_nucleus_ids() and getattr(args, "rollout_top_p", 1.0) not in (None, 1.0):
        return [
            "rollout_top_p is not 1: this Slime then needs each token's nucleus, which is not recorded; set it to 1"
        ]
    return []


def _colocation_mistakes(args: Any, config: PolarSlimeConfig) -> list[str]:
    if config.prefetch and getattr(args, "colocate", False):
        return ["polar_prefetch: colocated engines sleep between rollouts, so nothing may run then; set it to false"]
    return []


async def check_server(client: AsyncClient, config: PolarSlimeConfig) -> None:
    """Raises ConfigError where no rollout server answers at the configured address, or it wants a token."""
    try:
        await client.health()
    except ClientError as error:
        fix = "set POLAR_CONTROL_PLANE_TOKEN" if error.status == 401 else "start one with `polar serve`"
        raise ConfigError(f"polar_rollout_url: {error}; {fix}") from error
