"""Options that several commands share, said once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from polar.errors import ConfigError

DEFAULT_SERVER = "http://127.0.0.1:8080"
ENGINE_KINDS = "sglang, sglang_chat, vllm, vllm_chat, openai, or embedded (the small CPU engine)."
DEFAULT_DATA = Path("polar-data")

Server = Annotated[
    str,
    typer.Option("--server", envvar="POLAR_SERVER_URL", metavar="URL", help="The rollout server (`polar serve`)."),
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON for programs instead of tables for people.")]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log details too.")]
Data = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder for tasks, results and logs; made if missing. [polar-data]"),
]
GatewaysData = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="Folder for what is under way; made if missing. [polar-gateway-ID]"),
]
ServersData = Annotated[
    Path | None,
    typer.Option("--data", metavar="DIR", help="The data folder of a server on this machine: its token is read there."),
]
"""of commands that speak to a server; those that only look read a folder without a server by itself"""
TopologyFile = Annotated[
    Path | None,
    typer.Option(
        "--topology",
        metavar="FILE",
        envvar="POLAR_TOPOLOGY",
        help="A topology.yaml; options given beside it win.",
    ),
]
NodeId = Annotated[
    str | None,
    typer.Option(
        "--node-id", metavar="ID", envvar="POLAR_GATEWAY_NODE_ID", help="Which node of the topology; a name otherwise."
    ),
]
Config = Annotated[
    list[str] | None,
    typer.Option("--config", metavar="KEY=VALUE", help="A setting; VALUE is JSON, else text. May be repeated."),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="FILE", help="Write the new results there: .json, .jsonl, or .msgpack (smallest)."),
]


def settings(pairs: list[str] | None) -> dict[str, Any]:
    """Of --config. Raises ConfigError."""
    known: dict[str, Any] = {}
    for pair in pairs or []:
        name, equals, value = pair.partition("=")
        if not name or not equals:
            raise ConfigError(f"--config {pair!r}: write it as key=value")
        try:
            known[name] = msgspec.json.decode(value)
        except msgspec.DecodeError:
            known[name] = value
    return known
