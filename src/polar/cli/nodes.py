"""From a topology and the options beside it to the settings of one server and one gateway. An option wins over the
file; what neither says has the settings' own default; a value that cannot be is named by its option."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from polar.config import NodeSettings, RolloutSettings, Topology, describe, load_topology
from polar.errors import ConfigError

S = TypeVar("S", RolloutSettings, NodeSettings)
EMBEDDED = "embedded"
WHICH_ENGINE = (
    "which engine? Give --engine-url URL and --engine sglang, vllm or openai for one that runs; "
    "--engine embedded --model DIR to start the small CPU engine; or --topology FILE"
)


def topology(path: Path | None) -> Topology:
    """An empty one without a path."""
    return load_topology(path) if path else Topology()


def server_settings(known: Topology, host: str | None, port: int | None, data: Path | None) -> RolloutSettings:
    given = {"host": host, "port": port, "save_dir": str(data) if data else None}
    merged = known.rollout.model_dump() | _present(given)
    return _valid(RolloutSettings, merged)


def node_settings(
    known: Topology, node_id: str | None, options: dict[str, Any], inference: dict[str, Any]
) -> NodeSettings:
    """`options` and `inference` by the names of NodeSettings and InferenceSettings; None = not given."""
    base = known.node(node_id).model_dump() if known.gateway.nodes else _present({"id": node_id})
    engine = base.get("inference", {}) | _present(inference)
    if not engine.get("base_url"):
        raise ConfigError(WHICH_ENGINE)
    return _valid(NodeSettings, base | _present(options) | {"inference": engine})


def _present(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _valid(kind: type[S], values: dict[str, Any]) -> S:
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise ConfigError(describe(error)) from error
