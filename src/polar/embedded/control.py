"""SGLang's control routes: health, pausing, new weights, aborting, and what the engine says of itself."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any, Literal

from aiohttp import web
from pydantic import BaseModel

from polar.embedded.checkpoint import check_same_shapes, load_policy
from polar.embedded.engine import BadRequest, Engine, parse


class Pause(BaseModel):
    mode: Literal["abort", "in_place", "retract"] = "abort"


class NewWeights(BaseModel):
    model_path: str
    weight_version: str | None = None
    abort_all_requests: bool = False


class Abort(BaseModel):
    rid: str = ""
    abort_all: bool = False


def routes(engine: Engine) -> list[web.RouteDef]:
    scheduler = engine.scheduler

    async def health(request: web.Request) -> web.Response:
        await scheduler.call(lambda: None)  # the model's thread answers, too
        return web.Response()

    async def pause(request: web.Request) -> web.Response:
        await scheduler.pause((await parse(request, Pause)).mode)
        return web.json_response({"status": "ok", "message": "Generation paused"})

    async def resume(request: web.Request) -> web.Response:
        await scheduler.resume()
        return web.json_response({"status": "ok", "message": "Generation continued"})

    async def abort(request: web.Request) -> web.Response:
        body = await parse(request, Abort)
        if not body.rid and not body.abort_all:
            raise BadRequest("rid: say which request, or abort_all")
        await scheduler.abort(None if body.abort_all else body.rid)
        return web.Response()

    async def update(request: web.Request) -> web.Response:
        body = await parse(request, NewWeights)
        try:
            policy = await asyncio.to_thread(load_policy, Path(body.model_path))
            check_same_shapes(engine.checkpoint.policy, policy)
        except ValueError as error:
            return web.json_response({"success": False, "message": f"model_path: {error}"}, status=400)
        if body.abort_all_requests:
            await scheduler.abort(None)
        await scheduler.swap(policy, body.model_path, body.weight_version)
        return web.json_response(
            {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        )

    async def flush(request: web.Request) -> web.Response:
        return web.Response(text="Nothing is cached between requests.")

    async def model(request: web.Request) -> web.Response:
        return web.json_response(_model(engine))

    async def server(request: web.Request) -> web.Response:
        limits = {"context_length": engine.checkpoint.context_length, "max_running_requests": scheduler.max_running}
        return web.json_response(_model(engine) | limits | scheduler.load() | {"paused": scheduler.paused})

    async def version(request: web.Request) -> web.Response:
        return web.json_response({"weight_version": scheduler.weight_version})

    async def models(request: web.Request) -> web.Response:
        name, limit = engine.checkpoint.path, engine.checkpoint.context_length
        card = {"id": name, "object": "model", "created": int(time.time()), "owned_by": "polar", "max_model_len": limit}
        return web.json_response({"object": "list", "data": [card]})

    async def loads(request: web.Request) -> web.Response:
        return web.json_response({"loads": [{"dp_rank": 0, **scheduler.load()}]})

    posts = {"pause_generation": pause, "continue_generation": resume, "abort_request": abort, "flush_cache": flush}
    gets = {"health": health, "health_generate": health, "get_model_info": model, "model_info": model}
    gets |= {"get_server_info": server, "server_info": server, "get_weight_version": version}
    gets |= {"v1/models": models, "v1/loads": loads}
    return [
        *[web.post(f"/{path}", handler) for path, handler in (posts | {"update_weights_from_disk": update}).items()],
        *[web.get(f"/{path}", handler) for path, handler in gets.items()],
    ]


def _model(engine: Engine) -> dict[str, Any]:
    path = {"model_path": engine.scheduler.model_path, "tokenizer_path": engine.checkpoint.path}
    return path | {"is_generation": True, "weight_version": engine.scheduler.weight_version}
