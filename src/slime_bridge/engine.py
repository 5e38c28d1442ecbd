"""The policy version that the engine has now, asked of Slime's router or of an engine behind its address."""

from __future__ import annotations

import asyncio

import aiohttp

ANSWER_SECONDS, ALL_SECONDS = 5.0, 20.0


async def engine_version(http: aiohttp.ClientSession, url: str | None) -> str | None:
    """None where there is no engine to ask, or none that answers in time."""
    if url is None:
        return None
    try:
        async with asyncio.timeout(ALL_SECONDS):
            return await _first_told(http, url)
    except TimeoutError:
        return None


async def _first_told(http: aiohttp.ClientSession, url: str) -> str | None:
    workers = await _document(http, f"{url}/workers")
    engines = [worker["url"] for worker in workers.get("workers", []) if "url" in worker]
    for engine in [*engines, url]:
        for route in ("model_info", "get_model_info"):
            version = (await _document(http, f"{engine}/{route}")).get("weight_version")
            if version is not None:
                return str(version)
    return None


async def _document(http: aiohttp.ClientSession, url: str) -> dict:
    try:
        async with http.get(url, timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS)) as answer:
            document = await answer.json(content_type=None) if answer.status == 200 else {}
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}
