"""Settings and templates: right values come through with their types, wrong ones are errors that name the key."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from tests.bridge.making import arguments, group

from polar.errors import ConfigError
from slime_bridge.config import (
    KEYS,
    PolarSlimeConfig,
    checked_request,
    render_topology_template,
    resolve_polar_slime_config,
    task_payload,
)
from slime_bridge.slime_types import Sample


def payload(args, source=None, **changed):
    config = resolve_polar_slime_config(args)
    return task_payload(args, config, source or group(2), **({"rollout_id": 3, "task_position": 1} | changed))


def test_the_defaults():
    config = resolve_polar_slime_config(arguments())
    assert (config.max_async_level, config.prefetch) == (2, False)
    assert (config.callback_host, config.rules.reward_keys, config.eval_dataset_name) == ("127.0.0.1", (), "polar_eval")
    assert (config.weight_update_pause_timeout, config.max_consecutive_drops) == (300.0, 64)
    assert (config.rules.overlong, config.rules.timeout_policy, config.rules.max_tokens) == ("drop", "mask", 4096)
    assert config.staleness_bound == 3


def test_the_cap_of_a_trace_is_what_fits_on_the_ranks_of_one_sample():
    config = resolve_polar_slime_config(arguments(max_tokens_per_gpu=100, context_parallel_size=2))
    assert config.rules.max_tokens == 200
    assert resolve_polar_slime_config(arguments(polar_max_trajectory_tokens=7)).rules.max_tokens == 7


SEEN_AS: dict[str, tuple[object, Callable[[PolarSlimeConfig], object], list[object]]] = {
    "polar_rollout_url": ("http://a:1/", lambda config: config.rollout_url + "/", [5, "127.0.0.1:80", None]),
    "polar_topology_path": ("TOPOLOGY", lambda config: "TOPOLOGY", [5, "/no/such/file"]),
    "polar_task_template": (
        {"agent": {"harness": "x"}},
        lambda config: config.task_template,
        [None, "shell", ["agent"], {"evaluator": {}}],
    ),
    "polar_task_id_template": ("t-{rollout_id}", lambda config: config.task_id_template, [5, ["a"]]),
    "polar_instruction_template": ("Do {instruction}", lambda config: config.instruction_template, [True, {}]),
    "polar_reward_key": ("acc", lambda config: config.rules.reward_keys[1], [1, ["acc"]]),
    "polar_max_async_level": (3, lambda config: config.max_async_level, [0, -1, 1.5, True, "2"]),
    "polar_prefetch": (True, lambda config: config.prefetch, ["yes", 1, []]),
    "polar_overlong": ("clip", lambda config: config.rules.overlong, ["cut", 1]),
    "polar_timeout_policy": ("truncate", lambda config: config.rules.timeout_policy, ["keep", False]),
    "polar_single_survivor": ("raw", lambda config: "raw", ["one", 0]),
    "polar_request_timeout": (5, lambda config: config.request_timeout, [0, -1.0, math.nan, math.inf, "60"]),
    "polar_callback_host": (
        "10.0.0.1",
        lambda config: config.callback_host,
        ["0.0.0.0", "::", "[::]", 7, "http://10.0.0.1", "10.0.0.1:80"],
    ),
    "polar_min_complete_accept_fraction": (
        0.5,
        lambda config: config.min_complete_accept_fraction,
        [-0.1, 1.1, math.nan, "half", True],
    ),
    "polar_eval_dataset_name": ("held_out", lambda config: config.eval_dataset_name, [1, []]),
    "polar_task_timeout_floor": (60.0, lambda config: config.task_timeout_floor, [0, -1, "1m"]),
    "polar_weight_update_pause_timeout": (9.0, lambda config: config.weight_update_pause_timeout, [0, math.inf, "9"]),
    "polar_straggler_deadline": (9.0, lambda config: config.straggler_deadline, [0, -9, "soon"]),
    "polar_max_consecutive_drops": (3, lambda config: config.max_consecutive_drops, [0, 2.5, "64"]),
    "polar_max_trajectory_tokens": (99, lambda config: config.rules.max_tokens, [0, -5, 1e3]),
}
"""Each key: a right value, where it is seen, and wrong ones."""


def test_every_key_is_documented_and_in_this_table():
    documented = set(re.findall(r"polar_[a-z_]+", (Path(__file__).parents[2] / "docs" / "slime.md").read_text()))
    assert set(KEYS) == set(SEEN_AS) <= documented


@pytest.mark.parametrize("key", SEEN_AS)
def test_a_right_value_comes_through(key: str, tmp_path):
    value, seen, _ = SEEN_AS[key]
    (tmp_path / "topology.yaml").write_text("rollout: {port: 9}")
    given = str(tmp_path / "topology.yaml") if value == "TOPOLOGY" else value
    assert seen(resolve_polar_slime_config(arguments(**({"reward_key": "score"} | {key: given})))) == value


@pytest.mark.parametrize(("key", "value"), [(key, value) for key, (_, _, wrong) in SEEN_AS.items() for value in wrong])
def test_a_wrong_value_is_an_error_that_names_its_key(key: str, value: object):
    without = {"polar_rollout_url": None} if key == "polar_topology_path" else {}
    with pytest.raises(ConfigError, match=key):
        resolve_polar_slime_config(arguments(**(without | {key: value})))


@pytest.mark.parametrize(("key", "value"), [("rollout_batch_size", None), ("update_weights_interval", 0)])
def test_of_slimes_own_values_too(key: str, value: object):
    with pytest.raises(ConfigError, match=key):
        resolve_polar_slime_config(arguments(**{key: value}))


def test_a_topology_that_is_not_there_is_refused_beside_a_url_too():
    with pytest.raises(ConfigError, match=r"polar_topology_path: /no/such/file"):
        resolve_polar_slime_config(arguments(polar_topology_path="/no/such/file"))


def test_every_wrong_key_is_told_at_once_and_once():
    wrong = {key: values[0] for key, (_, _, values) in SEEN_AS.items()} | {"polar_rollout_url": "nowhere"}
    with pytest.raises(ConfigError) as told:
        resolve_polar_slime_config(arguments(**wrong, reward_key="score", polar_prefech=True))
    assert [len(re.findall(rf"(?:^|; ){key}\b", str(told.value))) for key in wrong] == [1] * len(wrong)
    assert "did you mean polar_prefetch?" in str(told.value)


def test_a_misspelt_key_is_refused_with_what_was_meant():
    with pytest.raises(ConfigError, match=r"polar_prefech: there is no such key; did you mean polar_prefetch\?"):
        resolve_polar_slime_config(arguments(polar_prefech=True))


def test_rewards_are_dicts_where_slime_reads_them_by_key():
    assert resolve_polar_slime_config(arguments(reward_key="acc")).rules.reward_keys == ("acc",)
    both = resolve_polar_slime_config(arguments(reward_key="acc", polar_reward_key="score"))
    assert both.rules.reward(0.5) == {"acc": 0.5, "score": 0.5}
    assert resolve_polar_slime_config(arguments(polar_reward_key="score")).rules.reward(0.5) == 0.5


def test_a_topology_gives_the_server(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text("rollout: {public_url: 'http://server:9/'}\n")
    config = resolve_polar_slime_config(arguments(polar_rollout_url=None, polar_topology_path=str(path)))
    assert config.rollout_url == "http://server:9"


@pytest.mark.parametrize(
    ("rollout", "url"),
    [
        ("{}", "http://127.0.0.1:8080"),
        ("{host: 10.0.0.1, port: 9}", "http://10.0.0.1:9"),
        ("{host: 'fd00::1'}", "http://[fd00::1]:8080"),
    ],
)
def test_a_topology_without_a_public_url(tmp_path, rollout: str, url: str):
    path = tmp_path / "topology.yaml"
    path.write_text(f"rollout: {rollout}\n")
    assert (
        resolve_polar_slime_config(arguments(polar_rollout_url=None, polar_topology_path=str(path))).rollout_url == url
    )


def test_a_topology_that_listens_everywhere_has_to_say_where_it_is(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text("rollout: {host: 0.0.0.0}\n")
    with pytest.raises(ConfigError, match=r"polar_topology_path.*set public_url"):
        resolve_polar_slime_config(arguments(polar_rollout_url=None, polar_topology_path=str(path)))


def test_a_task_carries_the_group_and_slimes_sampling():
    made = payload(arguments(), metadata={"group_id": 0}, callback_url="http://127.0.0.1:2/x")
    assert (made["task_id"], made["instruction"], made["num_samples"]) == ("polar-slime-3-0", "do it", 2)
    sampling = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 16, "stop_token_ids": [9]}
    assert made["sampling"] == sampling
    assert made["metadata"] == {"group_id": 0}
    request = checked_request(made)
    assert (request.callback_url, request.timeout_seconds) == ("http://127.0.0.1:2/x", 60.0)


def test_placeholders_keep_types_and_fill_texts():
    template = {
        "agent": {
            "harness": "shell",
            "custom_shell": {"command": "run {sample.label} {sample.metadata.none}"},
        },
        "timeout_seconds": "{sample.metadata.seconds}",
        "metadata": {"row": "{sample.metadata}", "n": "{num_rollouts}", "literal": "{{name}} {1} ${x y}"},
        "sampling": {"seed": "{sample.index}", "temperature": 0.1},
        "runtime": {"env": {"POSITION": "at {task_position} of {rollout_id}"}},
    }
    row = {"seconds": 5.5, "none": None}
    source = [Sample(group_index=8, index=80, prompt=[{"role": "user", "content": "a"}], label="42", metadata=row)]
    made = payload(arguments(polar_task_template=template), source)
    assert made["agent"]["custom_shell"]["command"] == "run 42 "
    assert (made["timeout_seconds"], made["instruction"]) == (5.5, "a")
    assert made["metadata"] == {"row": row, "n": 1, "literal": "{name} {1} ${x y}"}
    assert (made["sampling"]["seed"], made["sampling"]["temperature"]) == (80, 1.0)
    assert made["runtime"]["env"] == {"POSITION": "at 1 of 3"}


def test_an_instruction_template_wraps_the_prompt_and_a_task_id_template_names_the_task():
    args = arguments(polar_instruction_template="Do: {instruction}!", polar_task_id_template="t-{sample.group_index}")
    made = payload(args)
    assert (made["instruction"], made["task_id"]) == ("Do: do it!", "t-0")


@pytest.mark.parametrize("path", ["sample.metadata.nope", "nope", "args.nope", "sample.__class__", "args.__dict__"])
def test_an_unknown_path_is_an_error_that_names_it(path: str):
    template = {"agent": {"harness": "x", "env": {"A": f"-{{{path}}}-"}}}
    with pytest.raises(ConfigError, match=rf"polar_task_template.agent.env.A: unknown placeholder {{{path}}}"):
        payload(arguments(polar_task_template=template))


def test_a_template_that_is_no_task_names_the_field():
    made = payload(arguments(polar_task_template={"agent": {"harness": "shell"}}))
    with pytest.raises(ConfigError, match=r"polar_task_template: agent.*custom_shell"):
        checked_request(made)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"polar_task_id_template": "a/b"}, "polar_task_id_template: task_id: .*slashes"),
        ({"rollout_top_p": 2.0}, "Slime's rollout flags: sampling.top_p"),
        ({"rollout_stop_token_ids": ["x"]}, "Slime's rollout flags: sampling.stop_token_ids"),
        ({"polar_instruction_template": " "}, "instruction is empty"),
    ],
)
def test_a_task_that_is_refused_names_the_key_it_came_from(changed: dict, named: str):
    with pytest.raises(ConfigError, match=named):
        checked_request(payload(arguments(**changed)))


@pytest.mark.parametrize(("given", "expected"), [(10.0, 30.0), (50.0, 50.0), (None, 30.0)])
def test_the_timeout_floor(given: float | None, expected: float):
    template = {"agent": {"harness": "x"}} | ({} if given is None else {"timeout_seconds": given})
    assert (
        payload(arguments(polar_task_template=template, polar_task_timeout_floor=30.0))["timeout_seconds"] == expected
    )


def test_a_topology_template_points_its_gateways_at_slimes_router(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(
        "rollout: {save_dir: '{args.save}/polar'}\n"
        "gateway: {nodes: [{id: a, inference: {engine: sglang, base_url: 'http://other'}}, {id: b}]}\n"
    )
    args = arguments(save="/ckpt", sglang_router_ip="10.0.0.1", sglang_router_port=3000)
    document = yaml.safe_load(render_topology_template(path, args))
    assert document["rollout"]["save_dir"] == "/ckpt/polar"
    assert [node["inference"]["base_url"] for node in document["gateway"]["nodes"]] == ["http://10.0.0.1:3000"] * 2
    with pytest.raises(ConfigError, match="sglang_router_ip"):
        render_topology_template(path, arguments())


def test_a_prompt_with_a_picture_is_refused_unless_the_instruction_does_without_it():
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    prompt = [{"role": "user", "content": [{"type": "text", "text": "What is this?"}, picture]}]
    with pytest.raises(ConfigError, match=r"input_key: .*'image_url'.*polar_instruction_template"):
        payload(arguments(), group(1, prompt=prompt))
    made = payload(arguments(polar_instruction_template="See /session/{sample.label}.png"), group(1, prompt=prompt))
    assert made["instruction"] == "See /session/42.png"
    assert (
        payload(arguments(), group(1, prompt=[{"role": "user", "content": ["a", {"text": "b"}]}]))["instruction"]
        == "ab"
    )


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"prompt": None}, r"input_key: a prompt is null, .*\(prompt group 0\)"),
        ({"prompt": 5}, r"input_key: a prompt is 5, .*\(prompt group 0\)"),
        ({"metadata": "str"}, r"metadata_key: a prompt's metadata is 'str', no mapping \(prompt group 0\)"),
        (
            {"metadata": {}},
            r"unknown placeholder {sample.metadata.source}: at 'source', it has nothing \(prompt group 0\)",
        ),
    ],
)
def test_a_group_of_another_source_that_is_no_task_is_named(changed: dict, named: str):
    source = group(1)
    vars(source[0]).update(changed)
    template = {"agent": {"harness": "x", "env": {"A": "{sample.metadata.source}"}}}
    with pytest.raises(ConfigError, match=named):
        payload(arguments(polar_task_template=template), source)
