"""One connection pool an engine, and its faults by name: a dead, failing or silent one never looks like an answer."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import cache
from typing import Any

import aiohttp
import msgspec
import numpy as np

from polar.errors import EngineFault, HarnessFault, PolicyFault
from polar.proxy.engines.watch import PATIENCE_SECONDS, Watch
from polar.records import IDS, LogprobMode

POOL, _CONTROL_POOL = 1024, 64
CONNECT_SECONDS = 5.0
PROBE_SECONDS = 4.5
_JSON = {"Content-Type": "application/json"}
_TABLE = 1 << 18
"""ids below this have their text in a table"""
_OVERFLOW = ("context length", "context window", "longer than the model", "maximum allowed length", "max_model_len")
_CALLS_OWN = re.compile(
    r"temperature|top_[pk]|min_p|penalty|logit_bias|grammar|schema|structur|regex|image|multi-?modal", re.IGNORECASE
)


class EngineHTTP:
    def __init__(self, base_url: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        self.base_url = base_url
        self._session: aiohttp.ClientSession | None = None
        self._control: aiohttp.ClientSession | None = None
        self._mode: LogprobMode | None = None
        """as a probe found it; asked for again when the engine may have been started anew"""
        self._watch = Watch(self.alive, patience_seconds)

    @property
    def session(self) -> aiohttp.ClientSession:
        """For generations, which may wait in line for a connection."""
        if self._session is None:
            self._session = _client(POOL)
        return self._session

    @property
    def control(self) -> aiohttp.ClientSession:
        """For what must get through while all connections are taken."""
        if self._control is None:
            self._control = _client(_CONTROL_POOL)
        return self._control

    async def close(self) -> None:
        await self._watch.close()
        for session in (self._session, self._control):
            if session is not None:
                await session.close()

    @asynccontextmanager
    async def post(self, path: str, body: dict[str, Any]) -> AsyncIterator[aiohttp.ClientResponse]:
        """A 200 answer. Raises what `refused` tells, and EngineFault where none comes."""
        data = msgspec.json.encode(body)
        try:
            async with (
                self._watch.waiting() as limit,
                self.session.post(self.base_url + path, data=data, headers=_JSON) as response,
            ):
                if response.status != 200:
                    raise refused(response.status, (await response.read()).decode(errors="replace"))
                yield response
        except (aiohttp.ClientError, OSError) as error:
            if limit.expired():
                fault = f"the engine {self.base_url} hangs: {self._watch.found}"
                raise EngineFault(fault, name="engine_timeout") from error
            self._mode = None
            ended = isinstance(error, aiohttp.ServerDisconnectedError)  # whose text is the half answer's
            why = "the connection ended" if ended else error or type(error).__name__
            raise EngineFault(f"the engine {self.base_url} does not answer: {why}") from error

    async def document(self, response: aiohttp.ClientResponse) -> dict[str, Any]:
        data = await response.read()
        self._watch.heard()
        return parsed(data)

    async def events(self, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        """The documents of an event stream up to [DONE]. Raises EngineFault when it ends before."""
        held = first = b""
        while data := await response.content.readany():
            self._watch.heard()
            first = first or data
            *lines, held = (held + data).split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    payload = line[5:].strip()
                    if payload == b"[DONE]":
                        return
                    yield _event(payload)
        if first and b"data:" not in first:
            raise EngineFault(f"the engine's answer is no event stream: {first[:200]!r}", name="engine_error")
        raise EngineFault(f"the engine {self.base_url} ended its answer half-way", name="engine_down")

    async def alive(self) -> bool:
        """Whether it answers at all; that it is busy or paused does not matter."""
        try:
            async with asyncio.timeout(CONNECT_SECONDS), self.control.get(self.base_url + "/health"):
                return True
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def facts(self, path: str) -> dict[str, Any]:
        """A document about the engine; {} where it has none at this path."""
        try:
            async with self.control.get(self.base_url + path) as response:
                document = parsed(await response.read()) if response.status == 200 else {}
                return document if isinstance(document, dict) else {}
        except (aiohttp.ClientError, OSError, EngineFault):
            return {}


def _client(connections: int) -> aiohttp.ClientSession:
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
    connector = aiohttp.TCPConnector(limit=connections, keepalive_timeout=30)
    return aiohttp.ClientSession(connector=connector, timeout=timeout, read_bufsize=1 << 20)


def ids_text(ids: np.ndarray) -> msgspec.Raw:
    """Token ids [n] as a JSON list, spaces before each: for long prompts a good part of what a call costs."""
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= _TABLE:
        return msgspec.Raw(msgspec.json.encode(ids.tolist()))
    text = _texts().take(ids).view(np.uint8)
    text[0], text[-1] = ord("["), ord("]")  # in place of a space and of the last comma
    return msgspec.Raw(text.data)


@cache
def _texts() -> np.ndarray:
    """Eight bytes an id: its digits behind spaces, and a comma."""
    numbers = np.arange(_TABLE, dtype=np.int32)
    texts = np.full((_TABLE, 8), ord(","), np.uint8)
    for column in range(6, -1, -1):
        texts[:, column] = np.where((numbers > 0) | (column == 6), numbers % 10 + ord("0"), ord(" "))
        numbers //= 10
    return texts.view(np.int64)[:, 0]


def parsed(data: bytes) -> Any:
    """JSON as engines write it, with NaN, Infinity and halves of surrogate pairs."""
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError):
        pass
    try:
        return json.loads(json.dumps(json.loads(data), ensure_ascii=False).encode(errors="replace"))
    except (ValueError, RecursionError) as error:
        raise EngineFault(f"the engine's answer is not JSON: {data[:200]!r}", name="engine_error") from error


def ids_of(listed: Sequence[Any]) -> np.ndarray:
    """Token ids [n] of an answer. Raises TypeError or ValueError for what is none: numpy alone would take 1.5 for 1."""
    ids = np.asarray(listed)
    if not len(ids):
        return np.empty(0, IDS)
    if ids.dtype.kind not in "iu":
        raise TypeError("a token id that is no integer")
    if ids.min() < 0 or ids.max() > np.iinfo(IDS).max:
        raise ValueError(f"the token id {ids.min() if ids.min() < 0 else ids.max()}")
    return ids.astype(IDS)


@contextmanager
def readable() -> Iterator[None]:
    """Around what takes a document apart: of another shape than promised it is the engine's fault."""
    try:
        yield
    except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
        problem = f"the engine's answer cannot be read: {type(error).__name__}: {error}"
        raise EngineFault(problem, name="engine_lies") from error


def _event(payload: bytes) -> dict[str, Any]:
    document = parsed(payload)
    if not isinstance(document, dict):
        raise EngineFault(f"the engine's event is no object: {payload[:200]!r}", name="engine_error")
    if error := document.get("error"):
        raise refused(error.get("code") if isinstance(error, dict) else None, json.dumps(error))
    return document


def refused(status: Any, text: str) -> Exception:
    """The fault in an engine's error, by its words: engines have no code for a prompt that does not fit, nor for a
    setting or schema of the call that they do not take. What else they refuse is not the harness's fault."""
    if status in (400, 413, None) and any(words in text.lower() for words in _OVERFLOW):
        return PolicyFault(f"the engine refuses the prompt: {text[:500]}", name="context")
    if status in (400, 422) and _CALLS_OWN.search(text):
        return HarnessFault(f"the engine refuses the request: {text[:500]}", name="engine_refused")
    return EngineFault(f"the engine answered {status or 'an error'}: {text[:500]}", name="engine_error")
