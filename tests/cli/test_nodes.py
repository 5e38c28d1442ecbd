"""An option beside a topology wins; what neither says has the settings' own default."""

from __future__ import annotations

import pytest

from polar.cli.nodes import node_settings, server_settings, topology
from polar.errors import ConfigError

TOPOLOGY = """
rollout: {port: 9000, save_dir: /srv/polar}
gateway:
  heartbeat_interval_seconds: 1
  nodes:
    - {id: a, port: 9100, inference: {engine: vllm, base_url: "http://a:1"}, max_run_workers: 7}
    - {id: b, inference: {base_url: "http://b:1", tokenizer: /models/b}}
"""


@pytest.fixture
def known(tmp_path):
    path = tmp_path / "topology.yaml"
    path.write_text(TOPOLOGY)
    return topology(path)


def test_options_win_over_the_file(known):
    node = node_settings(known, "a", {"port": 0, "max_run_workers": None}, {"base_url": "http://c:1", "engine": None})
    assert (node.port, node.max_run_workers) == (0, 7)
    assert (node.inference.base_url, node.inference.engine) == ("http://c:1", "vllm")
    server = server_settings(known, None, 1234, None)
    assert (server.port, server.save_dir) == (1234, "/srv/polar")


def test_a_node_has_to_be_named_where_there_are_several(known):
    with pytest.raises(ConfigError, match="a, b"):
        node_settings(known, None, {}, {})


def test_without_a_file_defaults_hold():
    node = node_settings(topology(None), None, {}, {"base_url": "http://x:1"})
    assert (node.id, node.port, node.inference.engine) == ("node-0", 8100, "sglang")
    assert server_settings(topology(None), None, None, None).save_dir == "polar-data"


@pytest.mark.parametrize(("options", "field"), [({"port": -1}, "port"), ({"max_run_workers": 0}, "max_run_workers")])
def test_an_impossible_value_names_its_field(options, field):
    with pytest.raises(ConfigError, match=field):
        node_settings(topology(None), None, options, {"base_url": "http://x:1"})


def test_no_engine_is_an_error_that_lists_the_ways():
    with pytest.raises(ConfigError, match="--engine embedded --model DIR"):
        node_settings(topology(None), None, {}, {"engine": "sglang"})
