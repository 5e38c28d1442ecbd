"""One connection pool an engine, and its faults by name: a dead, failing or silent one never looks like an answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec

from polar.errors import EngineFault, PolicyFault

T = TypeVar("T")
POOL = 1024
CONNECT_SECONDS = 5.0
SILENCE_SECONDS = 15.0
"""after so long without a byte the engine is asked whether it is alive; a busy one may be silent for longer"""
PROBE_SECONDS = 4.5
_JSON = {"Content-Type": "application/json"}
_OVERFLOW = ("context length", "context window", "longer than the model", "maximum allowed length", "max_model_len")


class EngineHTTP:
    def __init__(self, base_url: str) -> None:
        self.base_url = base_url
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        if self._session is None:
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=POOL, keepalive_timeout=30)
            self._session = aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20)
        return self._session

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 answer. Raises EngineFault, or PolicyFault `context` where the prompt does not fit."""
        try:
            data = msgspec.json.encode(body)
            response = await self._patiently(self.session.post(self.base_url + path, data=data, headers=_JSON))
            async with response:
                if response.status != 200:
                    raise refused(response.status, (await response.read()).decode(errors="replace"))
                yield response
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFault(f"the engine {self.base_url} does not answer: {error or type(error).__name__}") from error

    async def document(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        return parsed(await self._patiently(response.read()))

    async def events(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        """The documents of an event stream up to [DONE]. Raises EngineFault when it ends before."""
        held = b""
        while data := await self._read(response):
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        return
                    yield _event(payload)
        raise EngineFault(f"the engine {self.base_url} ended its answer half-way", name="engine_down")

    async def alive(self) -> bool:
        """Whether it answers at all; that it is busy or paused does not matter."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS), self.session.get(self.base_url + "/health"):
                return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def facts(self, path: str) -> dict[str, Any]:
        """A document about the engine; {} where it has none at this path."""
        try:
            async with self.session.get(self.base_url + path) as response:
                document = parsed(await response.read()) if response.status == 200 else {}
                return document if isinstance(document, dict) else {}
        except (aiohttp.ClientError, OSError, EngineFault):
            return {}

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        while True:
            try:
                async with asyncio.timeout(SILENCE_SECONDS):
                    return await response.content.readany()
            except TimeoutError:
                await self._check_alive()

    async def _patiently(self, step: Awaitable[T]) -> T:
        task = asyncio.ensure_future(step)
        try:
            while not (await asyncio.wait({task}, timeout=SILENCE_SECONDS))[0]:
                await self._check_alive()
            return task.result()
        finally:
            task.cancel()

    async def _check_alive(self) -> None:
        if not await self.alive():
            raise EngineFault(f"the engine {self.base_url} hangs: not even /health answers", name="engine_timeout")


def parsed(data: bytes) -> Any:
    """JSON as engines write it, NaN and Infinity included."""
    try:
        return json.loads(data)
    except ValueError as error:
        raise EngineFault(f"the engine's answer is not JSON: {data[:200]!r}", name="engine_error") from error


def _event(payload: bytes) -> dict[str, Any]:
    document = parsed(payload)
    if not isinstance(document, dict):
        raise EngineFault(f"the engine's event is no object: {payload[:200]!r}", name="engine_error")
    if error := document.get("error"):
        raise refused(error.get("code") if isinstance(error, dict) else None, json.dumps(error))
    return document


def refused(status: Any, text: str) -> Exception:
    """The fault in an engine's error, by its words: engines have no code for a prompt that does not fit."""
    if status in (400, 413, None) and any(words in text.lower() for words in _OVERFLOW):
        return PolicyFault(f"the engine refuses the prompt: {text[:500]}", name="context")
    return EngineFault(f"the engine answered {status}: {text[:500]}", name="engine_error")
