"""Before the first task: every setting that cannot work is named with what to do, and the server is asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
from tests.bridge.making import arguments
from tests.peers.node import HEALTHY, Node
from tests.peers.relay import Relay
from tests.peers.trainer import Trainer
from tests.server.conftest import TOKEN, Server

from polar.errors import ConfigError
from polar.nodeapi import EngineState
from slime_bridge import preflight_server, rollout, slime_types
from slime_bridge.preflight import check_args, checked_config

Make = Callable[..., Trainer]
SHELL = {"agent": {"harness": "shell", "custom_shell": {"command": "true"}}, "evaluator": {"strategy": "command"}}


def check(**changed: object) -> None:
    args = arguments(**changed)
    checked_config(args)
    check_args(args)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        (
            {"polar_task_template": {"agent": {"harness": "shell"}}},
            r"polar_task_template: evaluator is missing.*e\.g\.",
        ),
        ({"use_dynamic_batch_size": False}, "use_dynamic_batch_size.*--max-tokens-per-gpu"),
        ({"calculate_per_token_loss": True}, "calculate_per_token_loss .*leave it out"),
        ({"log_passrate": True}, "log_passrate .*leave it out"),
        ({"partial_rollout": True}, "partial_rollout .*leave it out"),
        ({"mask_offpolicy_in_partial_rollout": True}, "mask_offpolicy_in_partial_rollout .*leave it out"),
        ({"multimodal_keys": {"image": "pictures"}}, "multimodal_keys .*leave it out"),
        ({"use_rollout_routing_replay": True}, "use_rollout_routing_replay .*leave it out"),
        ({"over_sampling_batch_size": 5}, "over_sampling_batch_size .*polar_max_async_level.*leave it out"),
        ({"dynamic_sampling_filter_path": "a.b"}, "dynamic_sampling_filter_path .*leave it out"),
        ({"rollout_sample_filter_path": "a.b"}, "rollout_sample_filter_path .*leave it out"),
        ({"rollout_all_samples_process_path": "a.b"}, "rollout_all_samples_process_path .*leave it out"),
        ({"rollout_sample_hook_path": ["a.b"]}, "rollout_sample_hook_path .*leave it out"),
        ({"custom_generate_function_path": "a.b"}, "custom_generate_function_path .*leave it out"),
        ({"custom_reward_post_process_path": None}, r"custom_reward_post_process_path .*set it to slime_bridge\."),
        ({"use_opd": True, "opd_type": "sglang"}, "opd_type .*set it to megatron"),
        ({"rollout_temperature": 0.0}, "rollout_temperature .*set it above 0"),
        ({"apply_chat_template": True}, "apply_chat_template .*leave it out"),
        ({"colocate": True, "polar_prefetch": True}, "polar_prefetch.*set it to false"),
        ({"offload_rollout": True, "polar_prefetch": True}, "polar_prefetch.*set it to false"),
    ],
)
def test_a_setting_that_cannot_work_is_named_with_the_fix(changed: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        check(**changed)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"colocate": True},
        {"over_sampling_batch_size": 2},
        {"custom_reward_post_process_path": None, "rewards_normalization": False},
        {"custom_reward_post_process_path": "mine.shape"},
        {"use_opd": True, "opd_type": "megatron"},
        {"use_tis": True, "use_rollout_logprobs": True},
        {"apply_chat_template": True, "polar_instruction_template": "Fix {sample.label}"},
        {"buffer_filter_path": None},
    ],
)
def test_a_setting_that_works_is_let_through(changed: dict):
    check(**changed)


def test_everything_that_is_wrong_is_told_at_once():
    with pytest.raises(ConfigError, match=r"partial_rollout.*use_dynamic_batch_size.*rollout_temperature"):
        check(rollout_temperature=0, partial_rollout=True, use_dynamic_batch_size=False)
    with pytest.raises(ConfigError, match=r"polar_prefech.*polar_overlong.*evaluator is missing.*rollout_temperature"):
        check(polar_prefech=1, polar_overlong="x", polar_task_template={"agent": {}}, rollout_temperature=0)


def test_top_p_is_refused_where_slime_wants_each_tokens_nucleus():
    if not slime_types.wants_nucleus_ids():
        check(rollout_top_p=0.9)
        return
    with pytest.raises(ConfigError, match=r"rollout_top_p .*set it to 1"):
        check(rollout_top_p=0.9)


@pytest.fixture(scope="module")
def one_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.kill()


@pytest.fixture
def server(one_server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """No gateway is there; engines and callbacks are not waited for long."""
    monkeypatch.setenv("POLAR_CONTROL_PLANE_TOKEN", TOKEN)
    monkeypatch.setattr(preflight_server, "ENGINE_SECONDS", 0.5)
    monkeypatch.setattr(preflight_server, "CALLBACK_SECONDS", 1.0)
    yield one_server
    rollout.close()


def refused(server: Server, named: str, **changed: object) -> None:
    settings = {"polar_rollout_url": server.url, "polar_task_template": SHELL, "prompt_data": None, "save": None}
    with pytest.raises(ConfigError, match=named):
        Trainer(arguments(**(settings | changed))).rollout(0)


def test_no_server(server: Server):
    began = time.monotonic()
    refused(server, "polar_rollout_url.*127.0.0.1:9.*polar serve", polar_rollout_url="http://127.0.0.1:9")
    assert time.monotonic() - began < 5


def test_a_server_that_wants_another_token(server: Server, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("POLAR_CONTROL_PLANE_TOKEN", "guessed")
    refused(server, "polar_rollout_url.*set POLAR_CONTROL_PLANE_TOKEN")


def test_no_gateway_then_one_whose_engine_failed_its_probe_then_one_that_gives_no_ids(server: Server):
    refused(server, "no gateway is connected to .*polar gateway")
    node = server.node()
    node.engine = EngineState(kind="sglang", healthy=False, problem="its answers lack meta_info.output_token_logprobs")
    node.poll()
    refused(server, r"no gateway .*\(node-a: its answers lack meta_info.output_token_logprobs\); see `polar doctor`")
    node.engine = EngineState(kind="openai", healthy=True)
    node.poll()
    refused(server, r"of kind openai: .* neither token ids nor their logprobs.*--engine sglang or vllm")
    refused(server, r"use_tis needs them, use_rollout_logprobs needs them", use_tis=True, use_rollout_logprobs=True)
    node.engine = HEALTHY
    node.poll()
    server.http.delete("/nodes/node-a").raise_for_status()
    refused(server, "node-a: draining")


def test_a_callback_host_that_the_server_does_not_reach(server: Server):
    node = Node(server.url, TOKEN, "node-b")
    node.poll()
    relay = Relay(server.url)
    relay.rewrite = lambda body: body.replace(b"http://127.0.0.1:", b"http://127.0.0.2:")
    named = r"polar_callback_host: .* does not reach this process at 127\.0\.0\.1:\d+.*set it to an address"
    try:
        refused(server, named, polar_rollout_url=relay.url)
    finally:
        relay.close()
    assert [name for name in server.http.get("/rollout/status").json()["tasks"] if name.startswith("polar-probe-")]


@pytest.mark.parametrize("host", ["192.0.2.1", "0.0.0.0", "::"])
def test_a_callback_host_that_is_none_of_this_machines(server: Server, host: str):
    Node(server.url, TOKEN, "node-b").poll()
    refused(server, f"polar_callback_host: .*{host}", polar_callback_host=host)
