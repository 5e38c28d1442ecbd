"""The gateways as trainers see them: who is there, and inference paused at all of them at once."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, HTTPException, Query, Request, Response

from polar.records import GatewayNodeInfo
from polar.replies import Health, InferenceStatus, Nodes, Pipeline, RolloutStatus
from polar.server import pauses, views
from polar.server.answers import gives, reply
from polar.server.core import Core


def add_fleet_routes(router: APIRouter, core: Core) -> None:
    _node_routes(router, core)
    _inference_routes(router, core)


def _node_routes(router: APIRouter, core: Core) -> None:
    @router.get("/health", **gives(Health))
    async def health(request: Request) -> Response:
        return reply(request, Health(status="ok", nodes=len(core.live_nodes())))

    @router.get("/rollout/status", **gives(RolloutStatus))
    async def status(request: Request) -> Response:
        """Every task's status, how many sessions wait, and the gateways."""
        tasks = dict(await core.select("SELECT task_id, status FROM tasks ORDER BY created_at"))
        pending = sum(session.queued for session in core.machine.sessions.values())
        document = RolloutStatus(
            tasks=tasks,
            pipeline=Pipeline(pending_sessions=pending),
            nodes=_nodes(core),
            storage=await core.retention.storage(core.full),
        )
        return reply(request, document)

    @router.get("/nodes", **gives(Nodes))
    async def list_nodes(request: Request) -> Response:
        return reply(request, _nodes(core))

    @router.get("/nodes/{node_id}", **gives(GatewayNodeInfo, 404, 422))
    async def get_node(node_id: str, request: Request) -> Response:
        return reply(request, _node(core, node_id))

    @router.delete("/nodes/{node_id}", **gives(GatewayNodeInfo, 404, 422))
    async def drain_node(node_id: str, request: Request) -> Response:
        """The gateway gets no more sessions, until it starts anew; those it has go on."""
        _node(core, node_id)
        core.machine.fleet.drain(core.machine.fleet.nodes[node_id])
        await core.settle()
        return reply(request, _node(core, node_id))


def _inference_routes(router: APIRouter, core: Core) -> None:
    @router.post("/rollout/inference/pause", **gives(InferenceStatus, 422, 504))
    async def pause(
        request: Request,
        mode: Literal["drain", "abort"] = "drain",
        timeout_seconds: Annotated[float, Query(gt=0, le=86400, allow_inf_nan=False)] = 300.0,
    ) -> Response:
        """Answers once every gateway has paused its model calls. The pause ends by itself after timeout_seconds."""
        if why := await pauses.pause(core, mode, timeout_seconds):
            raise HTTPException(504, why)
        return reply(request, pauses.status(core))

    @router.post("/rollout/inference/resume", **gives(InferenceStatus))
    async def resume(request: Request) -> Response:
        await pauses.resume(core)
        return reply(request, pauses.status(core))

    @router.get("/rollout/inference/status", **gives(InferenceStatus))
    async def inference_status(request: Request) -> Response:
        return reply(request, pauses.status(core))


def _nodes(core: Core) -> Nodes:
    live = core.live_nodes()
    return Nodes(nodes=[views.node_info(node, live) for node in core.machine.fleet.nodes.values()])


def _node(core: Core, node_id: str) -> GatewayNodeInfo:
    node = core.machine.fleet.nodes.get(node_id)
    if node is None:
        raise HTTPException(404, f"there is no node {node_id}")
    return views.node_info(node, core.live_nodes())
