"""SGLang by /generate: token ids in, so the context is the one the proxy made, also behind routers that drop fields.

Streams may repeat what came before (the default) or not (incremental output): the count in each event tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import uuid
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import numpy as np

from polar.errors import EngineFault
from polar.protocols import EngineCall, EngineFacts, Piece
from polar.proxy.engines.http import EngineHTTP, ids_of, ids_text, readable, refused
from polar.proxy.engines.probing import LIES, QUESTION, mode_of, probed
from polar.records import IDS, LOGPROBS, LogprobMode

_RENAMED = {"max_tokens": "max_new_tokens", "seed": "sampling_seed"}


class SGLang(EngineHTTP):
    kind = "sglang"
    takes_ids = True
    grammars = True

    async def generate(self, call: EngineCall) -> AsyncIterator[Piece]:
        assert call.prompt_ids is not None, "this engine takes ids"
        try:
            async with self.post("/generate", _request(call)) as response:
                seen = 0
                finished = False
                async for document in self._answers(call, response):
                    with readable():
                        piece = _piece(document, seen, len(call.prompt_ids))
                    seen += len(piece.ids)
                    finished = piece.finish_reason is not None
                    yield piece
                if not finished:
                    raise EngineFault("the engine ended its stream without a finish_reason", name="engine_error")
        except (asyncio.CancelledError, GeneratorExit):
            await asyncio.shield(self._abort(call.rid))
            raise

    async def probe(self) -> EngineFacts:
        facts = EngineFacts(kind=self.kind, healthy=False, route="/generate", grammars=self.grammars)
        return await probed(facts, self._ask(facts), self.base_url)

    async def _answers(self, call: EngineCall, response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
        if not call.stream:
            yield await self.document(response)
            return
        async for document in self.events(response):
            yield document

    async def _abort(self, rid: str) -> None:
        """Best effort: a router may not know this route, and the closed connection says the same."""
        with contextlib.suppress(aiohttp.ClientError, OSError, TimeoutError):
            async with asyncio.timeout(2.0), self.control.post(self.base_url + "/abort_request", json={"rid": rid}):
                return

    async def _ask(self, facts: EngineFacts) -> None:
        await self._describe(facts)
        sampling = {"max_tokens": 1, "temperature": 1.0}
        call = EngineCall(rid=uuid.uuid4().hex, stream=False, prompt_ids=np.asarray(QUESTION, IDS), sampling=sampling)
        async for piece in self.generate(call):
            facts.version = piece.version or facts.version
            facts.returns_ids = True
            if piece.logprobs is None:
                raise EngineFault(_missing("logprobs that match the token ids"), name=LIES)
            facts.returns_logprobs = True
        facts.logprob_mode = self._mode = self._mode or await self._find_mode()

    async def _describe(self, facts: EngineFacts) -> None:
        about: dict[str, Any] = {}
        for path in ("/server_info", "/get_server_info", "/model_info", "/get_model_info"):
            if not all(about.get(name) for name in ("tokenizer_path", "weight_version")):
                about = {name: value for name, value in (await self.facts(path)).items() if value is not None} | about
        models = (await self.facts("/v1/models")).get("data") or [{}]
        facts.context_length = about.get("context_length") or models[0].get("max_model_len")
        facts.tokenizer_path = about.get("tokenizer_path") or about.get("model_path")
        facts.model = about.get("served_model_name") or about.get("model_path")
        facts.version = _version(about)
        self.grammars = facts.grammars = type(self).grammars and about.get("grammar_backend") != "none"

    async def _find_mode(self) -> LogprobMode | None:
        """SGLANG_RETURN_ORIGINAL_LOGPROB makes it raw. The likeliest token is told whichever was sampled."""
        return await mode_of(self._likeliest, behind_top_k=False)

    async def _likeliest(self, temperature: float) -> float | None:
        sampling = {"max_new_tokens": 1, "temperature": temperature}
        body = {"input_ids": list(QUESTION), "sampling_params": sampling, "return_logprob": True}
        async with self.post("/generate", body | {"top_logprobs_num": 1}) as response:
            told = ((await self.document(response)).get("meta_info") or {}).get("output_top_logprobs")
        return told[0][0][0] if told and told[0] else None


class Embedded(SGLang):
    """Polar's own engine on the CPU speaks the same."""

    kind = "embedded"
    grammars = False

    async def _find_mode(self) -> LogprobMode | None:
        return LogprobMode.SAMPLING_TEMPERATURE


def _request(call: EngineCall) -> dict[str, Any]:
    assert call.prompt_ids is not None
    given = {_RENAMED.get(name, name): value for name, value in call.sampling.items() if value is not None}
    return {
        "rid": call.rid,
        "input_ids": ids_text(call.prompt_ids),
        "sampling_params": given | _form(call.grammar) | {"skip_special_tokens": False, "no_stop_trim": True},
        "return_logprob": True,
        "logprob_start_len": -1,
        "stream": call.stream,
    }


def _form(grammar: dict[str, Any] | None) -> dict[str, Any]:
    """A schema alone is what every grammar backend knows."""
    if grammar is None:
        return {}
    if grammar["type"] == "json_schema":
        return {"json_schema": json.dumps(grammar["json_schema"])}
    return {"structural_tag": json.dumps({"type": "structural_tag", "format": grammar})}


def _piece(document: dict[str, Any], seen: int, prompt_tokens: int) -> Piece:
    """What the event adds to the `seen` ids before it."""
    meta = document.get("meta_info")
    if not isinstance(meta, dict):
        raise EngineFault(_missing("token ids"), name=LIES)
    finish = meta.get("finish_reason") or {}
    kind = finish.get("type")
    if kind == "abort" and finish.get("status_code") not in (None, 200):
        raise refused(finish["status_code"], str(finish.get("message")))
    ids, logprobs = _tokens(document, meta, seen)
    if kind != "abort":
        _count(meta.get("prompt_tokens"), prompt_tokens, "prompt tokens; it was given")
    if kind not in (None, "abort"):
        _count(meta.get("completion_tokens"), seen + len(ids), "sampled tokens; it has given")
    return Piece(ids=ids, logprobs=logprobs, version=_version(meta), finish_reason=kind, matched=finish.get("matched"))


def _count(counted: int | None, known: int, what: str) -> None:
    if counted is not None and counted != known:
        raise EngineFault(f"the engine counts {counted} {what} {known}", name=LIES)


def _tokens(document: dict[str, Any], meta: dict[str, Any], seen: int) -> tuple[np.ndarray, np.ndarray | None]:
    entries, listed = meta.get("output_token_logprobs"), document.get("output_ids")
    if entries is None and listed is None:
        if meta.get("completion_tokens") == seen:
            return np.empty(0, IDS), None
        raise EngineFault(_missing("token ids"), name=LIES)
    total = meta.get("completion_tokens")
    entries = _new(entries or [], seen, total)
    ids = [entry[1] for entry in entries] if listed is None else _new(listed, seen, total)
    if [entry[1] for entry in entries] != ids:
        return ids_of(ids), None
    # A null is a logprob that the engine does not have: NaN in the record, never a number of ours (case 17).
    return ids_of(ids), np.asarray([entry[0] for entry in entries], LOGPROBS)


def _new(items: list[Any], seen: int, total: int | None) -> list[Any]:
    """Items behind the first `seen` ones, if the list repeats those."""
    repeats = seen and len(items) > (total - seen if total is not None else 0)
    return items[seen:] if repeats else items


def _version(about: dict[str, Any]) -> str | None:
    version = about.get("weight_version")
    return None if version is None else str(version)


def _missing(what: str) -> str:
    return (
        f"engine returns no {what}: field `output_token_logprobs` in `meta_info` is absent or misaligned. A router "
        "that drops unknown fields? Point base_url at the engine itself, or at a router that passes /generate on whole"
    )
