"""Wrong settings are found before the first task, and the message says the fix. Nothing is silently not honoured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from polar.errors import ConfigError
from slime_bridge.config import PolarSlimeConfig, resolve_polar_slime_config
from slime_bridge.slime_types import wants_nucleus_ids

REFUSED_SWITCHES = {
    "calculate_per_token_loss": "it ignores the grouping ids, so a trajectory of many traces would count many times",
    "log_passrate": "it wants exactly one sample a session, and a session may give several traces",
    "partial_rollout": "the proxy continues aborted calls by itself",
    "mask_offpolicy_in_partial_rollout": "the proxy continues aborted calls by itself, and tokens keep their versions",
    "multimodal_keys": "images reach the harness, but no trace carries their features",
    "use_rollout_routing_replay": "no engine route that Polar uses tells which experts a token took",
}
REFUSED_HOOKS = {
    "dynamic_sampling_filter_path": "Polar drops groups by the rules of polar_min_complete_accept_fraction",
    "rollout_sample_filter_path": "only Slime's own rollout function calls it",
    "rollout_all_samples_process_path": "only Slime's own rollout function calls it",
    "rollout_sample_hook_path": "only Slime's own rollout function calls it",
    "custom_generate_function_path": "the harness is the generate function",
}
REWARD_HOOK = "slime_bridge.reward_post_process.post_process_rewards"


def checked_config(args: Any) -> PolarSlimeConfig:
    """The settings. Raises ConfigError listing the mistakes in them together with those in Slime's own flags."""
    try:
        return resolve_polar_slime_config(args)
    except ConfigError as error:
        raise ConfigError("; ".join([str(error), *_mistakes(args)])) from error


def check_args(args: Any) -> None:
    """Raises ConfigError listing everything that is wrong, each with what to do."""
    if wrong := _mistakes(args):
        raise ConfigError("; ".join(wrong))


def _mistakes(args: Any) -> list[str]:
    return [
        *_task_mistakes(args),
        *_refused(args),
        *_batch_mistakes(args),
        *_sampling_mistakes(args),
        *_reward_mistakes(args),
        *_colocation_mistakes(args),
    ]


def _task_mistakes(args: Any) -> Iterator[str]:
    task, instruction = getattr(args, "polar_task_template", None), getattr(args, "polar_instruction_template", None)
    if isinstance(task, Mapping) and not task.get("evaluator"):
        yield (
            "polar_task_template: evaluator is missing, so no session would have a reward; e.g. "
            "{strategy: command, config: {command: ./test.sh}}"
        )
    if getattr(args, "apply_chat_template", False) and (not instruction or "{instruction}" in str(instruction)):
        yield (
            "apply_chat_template turns the prompt into the model's own markup, and the agent would be told that; leave "
            "it out: the proxy renders what the harness sends"
        )


def _refused(args: Any) -> list[str]:
    given = {**REFUSED_SWITCHES, **REFUSED_HOOKS}
    return [f"{name} is not supported: {why}; leave it out" for name, why in given.items() if getattr(args, name, None)]


def _batch_mistakes(args: Any) -> Iterator[str]:
    if getattr(args, "use_dynamic_batch_size", None) is False:
        yield (
            "use_dynamic_batch_size is off: a session may give several traces, and static micro-batches cannot take "
            "them; set --use-dynamic-batch-size and --max-tokens-per-gpu"
        )
    more = getattr(args, "over_sampling_batch_size", None)
    if more is not None and more != args.rollout_batch_size:
        yield (
            "over_sampling_batch_size is not supported: polar_max_async_level says how far ahead rollouts run; leave "
            "it out"
        )


def _sampling_mistakes(args: Any) -> Iterator[str]:
    if wants_nucleus_ids() and getattr(args, "rollout_top_p", 1.0) not in (None, 1.0):
        yield "rollout_top_p is not 1: this Slime then needs each token's nucleus, which is not recorded; set it to 1"
    temperature = getattr(args, "rollout_temperature", None)
    if temperature is not None and temperature <= 0:
        yield f"rollout_temperature is {temperature}: greedy decoding is no policy that can be trained; set it above 0"


def _reward_mistakes(args: Any) -> Iterator[str]:
    """An absent attribute is another caller's args, not Slime's."""
    hook = getattr(args, "custom_reward_post_process_path", REWARD_HOOK)
    if hook is None and getattr(args, "rewards_normalization", True):
        yield (
            "custom_reward_post_process_path is missing: Slime's own normalisation mixes the prompts' rewards once a "
            f"session gives several traces; set it to {REWARD_HOOK}"
        )
    if getattr(args, "use_opd", False) and getattr(args, "opd_type", None) == "sglang":
        yield "opd_type is sglang: no sample has the teacher's logprobs; set it to megatron"


def _colocation_mistakes(args: Any) -> Iterator[str]:
    if getattr(args, "polar_prefetch", False) and colocated(args):
        yield "polar_prefetch: colocated engines sleep between rollouts, so nothing may run then; set it to false"


def colocated(args: Any) -> bool:
    """Whether the engines give their memory to the trainer between rollouts."""
    return bool(getattr(args, "colocate", False) or getattr(args, "offload_rollout", False))
