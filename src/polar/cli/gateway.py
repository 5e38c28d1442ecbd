"""`polar gateway` and `polar server`: the two halves of `polar serve`, for more than one machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Annotated

import typer

from polar.cli import live as running
from polar.cli import lock, logs
from polar.cli.console import out, print_json
from polar.cli.nodes import node_settings, server_settings
from polar.cli.nodes import topology as read_topology
from polar.cli.options import Data, GatewaysData, Json, NodeId, TopologyFile, Verbose
from polar.config import NodeSettings
from polar.errors import ConfigError

ServerUrl = Annotated[
    str | None,
    typer.Option("--server", envvar="POLAR_SERVER_URL", metavar="URL", help="The rollout server. [the topology's]"),
]


def gateway(
    topology: TopologyFile = None,
    node_id: NodeId = None,
    server: ServerUrl = None,
    data: GatewaysData = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start one gateway of a topology, on the machine that is to run its sandboxes.

    POLAR_CONTROL_PLANE_TOKEN must be the server's control token (<server's data folder>/control_token).

    Example: polar gateway --topology topology.yaml --node-id node-1
    """
    logs.configure(verbose)
    if topology is None:
        raise ConfigError("which topology? Give --topology FILE (or set POLAR_TOPOLOGY)")
    known = read_topology(topology)
    node = node_settings(known, node_id, {}, {})
    url = server or known.gateway.rollout_server_url or known.rollout.url
    folder = data or Path(f"polar-gateway-{node.id}")
    with lock.held(folder):
        running.check_port(node.host, node.port, f"the port of node {node.id}")
        token = running.token_of(folder)
        beat = known.gateway.heartbeat_interval_seconds
        raise typer.Exit(running.live(lambda stop: _gateway(stop, node, url, token, folder, beat, json)))


async def _gateway(
    stop: running.Stop, node: NodeSettings, url: str, token: str, folder: Path, beat: float, json: bool
) -> None:
    async with asyncio.TaskGroup() as group:
        work = running.gateway(
            node, url, token, folder, beat, lambda there: _announce("gateway_url", there, folder, json)
        )
        await running.until_stopped(stop, group.create_task(work))


def server(
    topology: TopologyFile = None,
    host: Annotated[str | None, typer.Option("--host", help="Address to listen on. [127.0.0.1]")] = None,
    port: Annotated[int | None, typer.Option("--port", help="Port; 0 = a free one. [8080]")] = None,
    data: Data = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start the rollout server alone; gateways on other machines come to it.

    Example: polar server --host 0.0.0.0 --data /srv/polar
    """
    logs.configure(verbose)
    settings = server_settings(read_topology(topology), host, port, data)
    folder = Path(settings.save_dir)

    async def main(stop: running.Stop) -> None:
        async with asyncio.TaskGroup() as group:
            work = running.server(settings, running.token_of(folder), lambda url: _announce("url", url, folder, json))
            await running.until_stopped(stop, group.create_task(work))

    raise typer.Exit(running.live(main))


def _announce(name: str, url: str, folder: Path, json: bool) -> None:
    if json:
        print_json({name: url, "data": str(folder.resolve())})
    else:
        out().print(f"ready: {url} (data {folder})")
