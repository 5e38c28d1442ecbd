"""`polar serve`: the whole of Polar on one machine, a server and a gateway in one process over a real socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from polar.cli import lock, logs
from polar.cli.console import out, print_json, say
from polar.cli.engine_process import HOW_TO_MAKE_A_MODEL, EngineProcess
from polar.cli.live import Stop, check_port, engine_alive, gateway, live, server, token_of, until_stopped
from polar.cli.nodes import EMBEDDED, node_settings, server_settings, topology
from polar.cli.options import ENGINE_KINDS, Data, Json, NodeId, TopologyFile, Verbose
from polar.config import NodeSettings, RolloutSettings
from polar.errors import ConfigError

EngineUrl = Annotated[str | None, typer.Option("--engine-url", metavar="URL", help="An inference engine that runs.")]
EngineKind = Annotated[
    str | None,
    typer.Option("--engine", metavar="KIND", help=f"{ENGINE_KINDS} [sglang]"),
]
Model = Annotated[
    Path | None, typer.Option("--model", metavar="DIR", help="Weights for the embedded engine, which is then started.")
]
Tokenizer = Annotated[
    str | None,
    typer.Option("--tokenizer", metavar="DIR", help="Tokenizer folder. [the one that the engine reports]"),
]
Rendering = Annotated[
    str | None,
    typer.Option(
        "--rendering",
        metavar="HOW",
        help="`template`: the tokenizer folder's own; `renderers:NAME`: the extra package renderers. [template]",
    ),
]
ModelName = Annotated[str | None, typer.Option("--model-name", help="Name that harnesses see. [policy]")]
RuntimeName = Annotated[
    str | None,
    typer.Option("--runtime", help="Sandbox for tasks that name none; `local` is none at all. [bubblewrap]"),
]
Host = Annotated[str | None, typer.Option("--host", help="Address to listen on. [127.0.0.1]")]
Port = Annotated[int | None, typer.Option("--port", help="Port of the server; 0 = a free one. [8080]")]
GatewayPort = Annotated[int | None, typer.Option("--gateway-port", help="Port of the gateway. [8100]")]
InitWorkers = Annotated[int | None, typer.Option("--init-workers", help="Sandboxes coming up at once. [4]")]
RunWorkers = Annotated[int | None, typer.Option("--run-workers", help="Harnesses running at once. [2]")]
PostrunWorkers = Annotated[int | None, typer.Option("--postrun-workers", help="Sessions graded at once. [4]")]


_HEARTBEAT_SECONDS = 1.0
"""a fleet's is longer: here there is one gateway, and someone may be watching"""


def serve(
    engine_url: EngineUrl = None,
    engine: EngineKind = None,
    model: Model = None,
    tokenizer: Tokenizer = None,
    rendering: Rendering = None,
    model_name: ModelName = None,
    runtime: RuntimeName = None,
    host: Host = None,
    port: Port = None,
    gateway_port: GatewayPort = None,
    data: Data = None,
    init_workers: InitWorkers = None,
    run_workers: RunWorkers = None,
    postrun_workers: PostrunWorkers = None,
    topology_file: TopologyFile = None,
    node_id: NodeId = None,
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Start Polar on this machine: a rollout server and a gateway.

    It takes tasks at once, and carries them out as soon as the engine answers. Ctrl-C stops it and leaves nothing
    running; tasks that were under way go on at the next start with the same --data.

    Examples:

        polar serve --engine-url http://127.0.0.1:30000 --engine sglang

        polar serve --engine embedded --model runs/demo/policy --run-workers 8

    Then, in another terminal: polar run tasks.jsonl
    """
    logs.configure(verbose)
    known = topology(topology_file)
    settings = server_settings(known, host, port, data)
    folder = Path(settings.save_dir)
    child = _engine(engine, engine_url, model, folder / "engine.log")
    node = node_settings(
        known,
        node_id,
        {
            "host": host,
            "port": gateway_port,
            "model_served": model_name,
            "default_runtime": runtime,
            "max_init_workers": init_workers,
            "max_run_workers": run_workers,
            "max_postrun_workers": postrun_workers,
        },
        {
            "engine": EMBEDDED if child else engine,
            "base_url": child.url if child else engine_url,
            "tokenizer": tokenizer,
            "rendering": rendering,
        },
    )
    told = "heartbeat_interval_seconds" in known.gateway.model_fields_set
    beat = known.gateway.heartbeat_interval_seconds if told else _HEARTBEAT_SECONDS
    announce = partial(_announce, json, folder, node)
    if settings.port and (settings.host, settings.port) == (node.host, node.port):
        raise ConfigError(f"--port and --gateway-port are both {node.port}: the gateway needs one of its own")
    with lock.held(folder / "gateway"):
        check_port(settings.host, settings.port, "rollout.port (--port)")
        check_port(node.host, node.port, "the gateway's port (--gateway-port)")
        with child.running() if child else nullcontext():
            raise typer.Exit(live(lambda stop: _serve(stop, settings, node, child, beat, announce)))


def _engine(kind: str | None, url: str | None, model: Path | None, log: Path) -> EngineProcess | None:
    """The engine's process, where one is to be started."""
    if model is not None and (url is not None or kind not in (None, EMBEDDED)):
        raise ConfigError("--model is for --engine embedded without --engine-url: an engine that runs has its weights")
    if model is not None:
        return EngineProcess(model, log)
    if kind == EMBEDDED and url is None:
        raise ConfigError(f"--engine embedded needs --model DIR: {HOW_TO_MAKE_A_MODEL}")
    return None


async def _serve(
    stop: Stop,
    settings: RolloutSettings,
    node: NodeSettings,
    engine: EngineProcess | None,
    beat: float,
    announce: Callable[[str, str], None],
) -> None:
    folder = Path(settings.save_dir)
    token = token_of(folder)
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def our_gateway() -> None:
        url = await listening
        say(f"the rollout server listens on {url}; waiting for the engine {node.inference.base_url}")
        await gateway(node, url, token, folder / "gateway", beat, partial(announce, url))

    async with asyncio.TaskGroup() as group:
        serving = group.create_task(server(settings, token, listening.set_result))
        working = group.create_task(our_gateway())
        watching = [group.create_task(engine_alive(engine))] if engine else []
        await until_stopped(stop, working, serving, *watching)


def _announce(json: bool, folder: Path, node: NodeSettings, url: str, gateway_url: str) -> None:
    engine_url = node.inference.base_url
    if json:
        where = {"url": url, "gateway_url": gateway_url, "engine_url": engine_url, "data": str(folder.resolve())}
        print_json(where)
    else:
        out().print(f"ready: {url} (gateway {gateway_url}, engine {engine_url}, data {folder})")
