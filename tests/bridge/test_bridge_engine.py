"""The policy version is asked of the engines behind the router, by whichever route they have; nobody waits for it."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from slime_bridge.engine import engine_version


async def ask(documents: dict[str, Any], *, behind_router: bool) -> str | None:
    """Of an engine that answers these routes; its router lists an engine that is gone before it."""

    async def answer(request: web.Request) -> web.Response:
        known = documents.get(request.path)
        return web.json_response(known) if known is not None else web.Response(status=404, text="no such route")

    async def workers(request: web.Request) -> web.Response:
        return web.json_response(
            {"workers": [{"id": 1}, {"url": "http://127.0.0.1:9"}, {"url": str(engine.make_url(""))}]}
        )

    app, router_app = web.Application(), web.Application()
    app.router.add_get("/{path:.*}", answer)
    router_app.router.add_get("/workers", workers)
    async with TestServer(app) as engine, TestServer(router_app) as router, aiohttp.ClientSession() as http:
        return await engine_version(http, str((router if behind_router else engine).make_url("")).rstrip("/"))


@pytest.mark.parametrize("behind_router", [True, False])
@pytest.mark.parametrize("route", ["/model_info", "/get_model_info"])
def test_the_version_of_an_engine(route: str, behind_router: bool):
    assert asyncio.run(ask({route: {"weight_version": 7}}, behind_router=behind_router)) == "7"


@pytest.mark.parametrize(
    "told", [{}, {"/model_info": {}}, {"/model_info": [1]}, {"/model_info": {"weight_version": None}}]
)
def test_an_engine_that_does_not_tell(told: dict[str, Any]):
    assert asyncio.run(ask(told, behind_router=False)) is None


def test_no_engine():
    async def nobody() -> tuple[str | None, str | None]:
        async with aiohttp.ClientSession() as http:
            return await engine_version(http, None), await engine_version(http, "http://127.0.0.1:9")

    assert asyncio.run(nobody()) == (None, None)
