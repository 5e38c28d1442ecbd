"""The rollout server is asked before the first task: is it there, can its engines be trained from, can it call back."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any
from urllib.parse import urlsplit

from polar.client import AsyncClient, ClientError
from polar.errors import ConfigError
from polar.records import GatewayNodeInfo
from slime_bridge.config import PolarSlimeConfig
from slime_bridge.tasks import Tasks

log = logging.getLogger(__name__)
ENGINE_SECONDS = 60.0
"""engines that have just been started load their weights; a gateway asks them again every few seconds"""
CALLBACK_SECONDS = 60.0
LOOK_SECONDS = 0.5
PROBE = "polar-probe"
WITHOUT_IDS = "openai"
NEEDS_LOGPROBS = ("use_tis", "use_rollout_logprobs")


async def check_server(client: AsyncClient, args: Any, config: PolarSlimeConfig) -> None:
    """Waits until one gateway's engine is healthy. Raises ConfigError where no rollout server answers, it wants a
    token, no gateway becomes healthy in time, or no engine gives token ids."""
    nodes = await _with_a_usable_one(client, config)
    if all(node.engine == WITHOUT_IDS for node in nodes if _usable(node)):
        asked = [f"{name} needs them" for name in NEEDS_LOGPROBS if getattr(args, name, False)]
        raise ConfigError(
            f"the engine is of kind {WITHOUT_IDS}: it gives neither token ids nor their logprobs, so nothing can be "
            f"trained ({', '.join([*asked, 'give the gateway --engine sglang or vllm'])})"
        )


async def check_callback(tasks: Tasks, config: PolarSlimeConfig, run_id: str) -> None:
    """Hands in a task and cancels it, which the server tells by callback. Raises ConfigError where it cannot."""
    task = {"task_id": f"{PROBE}-{run_id}", "instruction": "nothing", "agent": {"import_path": "polar_probe:Nothing"}}
    try:
        heard = await tasks.probe(task, CALLBACK_SECONDS)
    except ClientError as error:
        raise ConfigError(f"polar_rollout_url: the rollout server refused a task: {error}") from error
    if not heard:
        raise ConfigError(
            f"polar_callback_host: the rollout server at {config.rollout_url} does not reach this process at "
            f"{urlsplit(tasks.callback_url or '').netloc}: nothing came within {CALLBACK_SECONDS:g} s; set it to an "
            "address of this machine that the server can reach, and let its port through"
        )


async def _with_a_usable_one(client: AsyncClient, config: PolarSlimeConfig) -> list[GatewayNodeInfo]:
    deadline, told = time.monotonic() + ENGINE_SECONDS, ""
    while True:
        nodes = await _nodes(client)
        if any(_usable(node) for node in nodes):
            return nodes
        why = _why_none(nodes, config)
        if time.monotonic() > deadline:
            raise ConfigError(why)
        if why != told:
            log.warning("%s; waiting up to %g s", why, ENGINE_SECONDS)
        told = why
        await asyncio.sleep(LOOK_SECONDS)


async def _nodes(client: AsyncClient) -> list[GatewayNodeInfo]:
    try:
        return (await client.nodes()).nodes
    except ClientError as error:
        fix = "set POLAR_CONTROL_PLANE_TOKEN" if error.status == 401 else "start one with `polar serve`"
        raise ConfigError(f"polar_rollout_url: {error}; {fix}") from error


def _usable(node: GatewayNodeInfo) -> bool:
    return node.healthy and not node.draining


def _why_none(nodes: list[GatewayNodeInfo], config: PolarSlimeConfig) -> str:
    if not nodes:
        return (
            f"polar_rollout_url: no gateway is connected to {config.rollout_url}; start one with `polar gateway`, or "
            "both with `polar serve`"
        )
    told = "; ".join(f"{node.node_id}: {_trouble(node)}" for node in nodes)
    return f"polar_rollout_url: no gateway of {config.rollout_url} can take a session ({told}); see `polar doctor`"


def _trouble(node: GatewayNodeInfo) -> str:
    if node.problem is not None:
        return node.problem
    return "draining" if node.draining else "its engine is not ready" if not node.healthy else "ready"
