"""Settings of server and gateways: a topology file (strict: an unknown key is refused by name) or the command line.

Environment: POLAR_TOPOLOGY, POLAR_GATEWAY_NODE_ID, POLAR_CONTROL_PLANE_TOKEN.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from polar.errors import ConfigError, WrongFields

TEMPLATE, RENDERERS = "template", "renderers:"
"""how prompts are rendered: by the tokenizer folder's chat template, or by one of the package renderers"""


def _check_url(value: str) -> str:
    if not re.fullmatch(r"https?://[^\s/]+\S*", value):
        raise ValueError(f"{value!r} is no URL: write it like http://127.0.0.1:8080")
    return value


def check_rendering(value: str) -> str:
    if value != TEMPLATE and not value.startswith(RENDERERS):
        raise ValueError(f"{value!r} is neither {TEMPLATE} nor {RENDERERS}NAME")
    return value


Port = Annotated[int, Field(ge=0, le=65535)]
Url = Annotated[str, AfterValidator(_check_url)]
TOKEN_HEADER = "X-Polar-Control-Token"
DELIVERY_HEADER = "X-Polar-Delivery"
IGNORED_HEADER = "X-Polar-Ignored"
TOKEN_VARIABLE = "POLAR_CONTROL_PLANE_TOKEN"
SERVER_PORT, GATEWAY_PORT = 8080, 8100


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class InferenceSettings(Strict):
    """`tokenizer`: a folder with tokenizer.json and a chat template; else the one that the engine reports. `rendering`:
    `template`, or `renderers:NAME` for a model that has no usable template. `patience_seconds`: an engine that answers
    /health, and for so long hands nothing to anybody who waits, hangs."""

    engine: str = "sglang"
    base_url: Url
    tokenizer: str | None = None
    rendering: Annotated[str, AfterValidator(check_rendering)] = TEMPLATE
    patience_seconds: Annotated[float, Field(gt=0)] = 300.0


class ResourceSettings(Strict):
    """What the node's sandboxes may use together; None = what the machine has."""

    cpus: Annotated[float, Field(ge=0)] | None = None
    memory_mb: Annotated[int, Field(ge=0)] | None = None
    gpus: Annotated[int, Field(ge=0)] = 0


class PriceSettings(Strict):
    """Of a million tokens, in the currency in which tasks say `limits.cost`."""

    input: Annotated[float, Field(ge=0)]
    output: Annotated[float, Field(ge=0)]


class NodeSettings(Strict):
    id: str = "node-0"
    host: str = "127.0.0.1"
    port: Port = GATEWAY_PORT
    public_url: Url | None = None
    model_served: str = "policy"
    inference: InferenceSettings
    prices: PriceSettings | None = None
    max_init_workers: Annotated[int, Field(ge=1)] = 4
    max_run_workers: Annotated[int, Field(ge=1)] = 2
    max_postrun_workers: Annotated[int, Field(ge=1)] = 4
    default_runtime: str | None = None
    labels: dict[str, str] = {}
    """a task may ask for them (`node_labels`)"""
    resources: ResourceSettings = Field(default_factory=ResourceSettings)

    @property
    def url(self) -> str:
        return self.public_url or f"http://{self.host}:{self.port}"


class RolloutSettings(Strict):
    host: str = "127.0.0.1"
    port: Port = SERVER_PORT
    public_url: Url | None = None
    save_dir: str = "polar-data"
    lease_seconds: Annotated[float, Field(gt=0)] = 30.0
    delivery_seconds: Annotated[float, Field(gt=0)] = 3600.0
    """how long a callback that is not acknowledged is tried again, and a result kept whatever the bounds below"""
    callback_timeout_seconds: Annotated[float, Field(gt=0)] = 30.0
    """how long a receiver may take to answer a callback; large ones have more time"""
    retain_days: Annotated[float, Field(gt=0)] | None = 30.0
    """days of the server's running; None: for ever"""
    retain_gb: Annotated[float, Field(gt=0)] | None = 100.0
    """of 10^9 bytes; None: without bound"""

    @property
    def url(self) -> str:
        return self.public_url or f"http://{self.host}:{self.port}"


class GatewaySettings(Strict):
    heartbeat_interval_seconds: Annotated[float, Field(gt=0)] = 5.0
    rollout_server_url: Url | None = None
    nodes: list[NodeSettings] = []


class Topology(Strict):
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    gateway: GatewaySettings = Field(default_factory=GatewaySettings)

    def node(self, node_id: str | None = None) -> NodeSettings:
        """The node of this id (or POLAR_GATEWAY_NODE_ID, or the only one). Raises ConfigError."""
        wanted = node_id or os.environ.get("POLAR_GATEWAY_NODE_ID")
        known = {node.id: node for node in self.gateway.nodes}
        if wanted is None and len(known) == 1:
            return next(iter(known.values()))
        if wanted in known:
            return known[wanted]
        problem = "several nodes" if wanted is None and known else f"no node {wanted!r}" if wanted else "no node"
        names = ", ".join(known) or "none"
        raise ConfigError(f"gateway.nodes has {problem}: it has {names}. Name one: --node-id, or POLAR_GATEWAY_NODE_ID")


def load_topology(path: str | Path | None = None) -> Topology:
    """Reads `path`, else the file POLAR_TOPOLOGY names. Raises ConfigError naming the key and the file."""
    name = path or os.environ.get("POLAR_TOPOLOGY")
    if not name:
        raise ConfigError("no topology: give a path, or set POLAR_TOPOLOGY")
    try:
        document: Any = yaml.safe_load(Path(name).read_text())
    except OSError as error:
        raise ConfigError(f"cannot read the topology {name}: {error.strerror}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"the topology {name} is not YAML: {error}") from error
    if document is None:
        raise ConfigError(f"the topology {name} is empty")
    try:
        return Topology.model_validate(document)
    except ValidationError as error:
        raise ConfigError(f"the topology {name}: {describe(error)}") from error


def describe(error: ValidationError) -> str:
    """One line: `path.to.field: what is wrong` for each mistake."""
    return "; ".join(
        f"{'.'.join(map(str, item['loc'])) or 'document'}: {_plain(item['type'], item['msg'])}"
        for item in error.errors()
    )


def wrong_fields(error: ValidationError, *path: str) -> WrongFields:
    """The same, where the model is the part of a task at `path`."""
    return WrongFields([((*path, *item["loc"]), _plain(item["type"], item["msg"])) for item in error.errors()])


def _plain(kind: str, message: str) -> str:
    words = {"missing": "is missing", "extra_forbidden": "there is no such key"}
    return words.get(kind, message.removeprefix("Value error, "))


def control_token(data_folder: Path) -> str:
    """The control token: POLAR_CONTROL_PLANE_TOKEN, else `<data folder>/control_token`, made (0600) at first start."""
    given = os.environ.get(TOKEN_VARIABLE)
    if given:
        return given
    path = data_folder / "control_token"
    data_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not path.exists():
        fd, partial = tempfile.mkstemp(dir=data_folder)  # 0600
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(32))
        with suppress(FileExistsError):  # two that start at once agree on the first one's
            os.link(partial, path)
        os.unlink(partial)
    return path.read_text().strip()
