"""A router in front of an engine that handles what it passes on: it packs answers with gzip and says each header of its
own a second time, beside the engine's."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import zlib
from collections.abc import Iterator

import aiohttp
from aiohttp import web

_TWICE = {"Server": "router", "Date": "Thu, 01 Jan 1970 00:00:00 GMT", "Content-Type": "application/json"}


async def _answer(request: web.Request, client: aiohttp.ClientSession, target: str) -> web.StreamResponse:
    """Piece by piece, so that a stream stays one."""
    async with client.request(request.method, target + request.path, data=await request.read()) as answer:
        response = web.StreamResponse(status=answer.status, headers={"Content-Encoding": "gzip"})
        for name, text in _TWICE.items():
            response.headers.add(name, answer.headers.get(name, text))
            response.headers.add(name, text)
        await response.prepare(request)
        packer = zlib.compressobj(wbits=31)
        async for data in answer.content.iter_any():
            await response.write(packer.compress(data) + packer.flush(zlib.Z_SYNC_FLUSH))
        await response.write(packer.flush())
        return response


async def _serve(sock: socket.socket, target: str, stop: asyncio.Event) -> None:
    async with aiohttp.ClientSession() as client:

        async def pass_on(request: web.Request) -> web.StreamResponse:
            return await _answer(request, client, target)

        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", pass_on)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.SockSite(runner, sock).start()
        await stop.wait()
        await runner.cleanup()


@contextlib.contextmanager
def router(target: str) -> Iterator[str]:
    """Its URL."""
    sock, loop, stop = socket.create_server(("127.0.0.1", 0)), asyncio.new_event_loop(), asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(sock, target, stop),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
