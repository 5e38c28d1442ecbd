"""Requests: wrong values name their field, unknown fields are named and ignored, nothing that is not finite passes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from polar.codec import from_json, from_msgpack, to_json, to_msgpack
from polar.config import Topology, control_token, load_topology
from polar.errors import ConfigError
from polar.records import Trace
from polar.requests import TaskRequest, ignored_fields

TASK: dict[str, Any] = {"task_id": "t", "instruction": "do it", "agent": {"harness": "mini_swe_agent"}}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_samples", 0),
        ("timeout_seconds", 0),
        ("timeout_seconds", -1),
        ("timeout_seconds", float("nan")),
        ("timeout_seconds", float("inf")),
        ("timeout_seconds", "abc"),
        ("task_id", ""),
        ("task_id", "../etc"),
        ("dispatch_priority", 101),
        ("sampling", {"temperature": float("nan")}),
        ("budgets", {"init": -1}),
        ("limits", {"turns": 0}),
        ("agent", {"harness": "shell"}),
        ("agent", {}),
        ("agent", {"harness": "mini_swe_agent", "env": {"A": "x\0y"}}),
        ("agent", {"harness": "mini_swe_agent", "env": {"A=B": "x"}}),
        ("agent", {"harness": "shell", "custom_shell": {"command": "echo \0"}}),
        ("runtime", {"env": {"": "x"}}),
        ("runtime", {"prepare": [{"type": "exec"}]}),
        ("runtime", {"prepare": [{"type": "upload_file", "target": "/x"}]}),
        ("callback_format", "xml"),
    ],
)
def test_a_bad_value_names_its_field(field: str, value: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        TaskRequest.model_validate(TASK | {field: value})
    assert caught.value.errors()[0]["loc"][0] == field


@pytest.mark.parametrize("instruction", ["", " \n\t"])
def test_an_empty_instruction_is_refused(instruction: str) -> None:
    with pytest.raises(ValidationError, match="instruction is empty"):
        TaskRequest.model_validate(TASK | {"instruction": instruction})


def test_unknown_fields_are_named_with_their_paths() -> None:
    raw = TASK | {"colour": 1, "runtime": {"imagee": "x", "prepare": [{"type": "exec", "command": "x", "when": 1}]}}
    raw["sampling"] = {"repetition_penalty": 1.1, "temprature": 1}
    assert ignored_fields(raw) == ["colour", "runtime.imagee", "runtime.prepare.when", "sampling.temprature"]
    assert TaskRequest.model_validate(raw).sampling.model_dump()["repetition_penalty"] == 1.1


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans(), st.floats(-50, 0, width=32)), max_size=40))
def test_a_trace_survives_both_encodings_to_the_bit(tokens: list[tuple[int, bool, float]]) -> None:
    ids, mask, logprobs = ([token[part] for token in tokens] for part in range(3))
    trace = Trace(prompt_ids=[1, 2], response_ids=ids, loss_mask=mask, response_logprobs=logprobs)
    for back in (from_msgpack(to_msgpack(trace), Trace), from_json(to_json(trace), Trace)):
        for name in ("prompt_ids", "response_ids", "loss_mask", "response_logprobs"):
            one, other = getattr(trace, name), getattr(back, name)
            assert one.dtype == other.dtype
            assert np.array_equal(one, other)


def test_a_wrong_array_names_its_path() -> None:
    with pytest.raises(msgspec.ValidationError, match="response_ids"):
        from_json(b'{"prompt_ids": [1], "response_ids": ["x"], "loss_mask": [1]}', Trace)


def test_a_topology_refuses_what_it_does_not_know(tmp_path: Path) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text("gateway:\n  nodes:\n  - id: a\n    inference: {base_url: x, enginee: sglang}\n")
    with pytest.raises(ConfigError, match=r"gateway\.nodes\.0\.inference\.enginee"):
        load_topology(path)
    with pytest.raises(ConfigError, match="cannot read the topology"):
        load_topology(tmp_path / "none.yaml")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("[]", "document: Input should be a valid dictionary"),
        ("rollout: {public_url: nope}", r"rollout\.public_url: 'nope' is no URL: write it like http"),
        ("gateway: {nodes: [{inference: {base_url: 'http:/x'}}]}", r"inference\.base_url: 'http:/x' is no URL"),
        ("gateway: {nodes: [{inference: {base_url: 'http://x', rendering: y}}]}", "'y' is neither template nor rend"),
    ],
)
def test_a_topology_that_could_never_work_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "topology.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_topology(path)


def test_of_several_nodes_one_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLAR_GATEWAY_NODE_ID", raising=False)
    nodes = [{"id": name, "inference": {"base_url": "http://x"}} for name in ("a", "b")]
    known = Topology.model_validate({"gateway": {"nodes": nodes}})
    assert known.node("b").id == "b"
    with pytest.raises(ConfigError, match=r"has several nodes: it has a, b\. Name one: --node-id"):
        known.node()
    with pytest.raises(ConfigError, match="has no node 'c': it has a, b"):
        known.node("c")


def test_the_control_token_is_made_once_and_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("POLAR_CONTROL_PLANE_TOKEN", raising=False)
    token = control_token(tmp_path / "data")
    assert token == control_token(tmp_path / "data")
    assert len(token) > 30
    assert (tmp_path / "data" / "control_token").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in (tmp_path / "data").iterdir()] == ["control_token"]


@pytest.mark.parametrize(
    ("fields", "path"),
    [
        ({"task_id": "s\ud800"}, "task_id"),
        ({"instruction": "half \udc00"}, "instruction"),
        ({"metadata": {"deep": [1, {"er": "\ud800"}]}}, "metadata.deep.1.er"),
        ({"metadata": {"\ud800": 1}}, "a name in metadata"),
    ],
)
def test_half_a_surrogate_pair_is_named(fields: dict[str, Any], path: str) -> None:
    with pytest.raises(ValidationError, match=f"{path}: half of a surrogate pair"):
        TaskRequest.model_validate(TASK | fields)
