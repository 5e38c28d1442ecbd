"""vLLM, by token ids where it takes them: its token endpoint (--enable-scale-out), else completions of a list of ids.

Where it has neither, by chat completions with token ids: vLLM renders the prompt, and says which ids it used.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

import numpy as np

from polar.errors import EngineFault
from polar.protocols import EngineCall, EngineFacts, Piece
from polar.proxy.engines.http import PATIENCE_SECONDS, ids_of, ids_text, readable
from polar.proxy.engines.openai import ROUTE as CHAT
from polar.proxy.engines.openai import OpenAI
from polar.proxy.engines.probing import LIES, QUESTION, mode_of, probed
from polar.records import IDS, LOGPROBS

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"


class VLLM(OpenAI):
    """The first good probe decides on the route, for good."""

    kind = "vllm"
    # What is not said vLLM takes from the model's generation_config.json.
    defaults: ClassVar[Mapping[str, Any]] = {"repetition_penalty": 1.0, "min_p": 0.0}
    # top_logprobs null would turn logprobs off (case 14).
    extras: ClassVar[Mapping[str, Any]] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}

    def __init__(self, base_url: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        super().__init__(base_url, patience_seconds)
        self._routes: tuple[str, ...] = (GENERATE, COMPLETIONS, CHAT)

    async def generate(self, call: EngineCall) -> AsyncIterator[Piece]:
        pieces = super().generate(call) if call.prompt_ids is None else self._by_ids(call, self._routes[0])
        async for piece in pieces:
            yield piece

    async def probe(self) -> EngineFacts:
        facts = EngineFacts(kind=self.kind, healthy=False, route=self._routes[-1], grammars=True)
        return await probed(facts, self._ask(facts), self.base_url)

    def check(self, pieces: list[Piece]) -> None:
        ids = sum(len(piece.ids) for piece in pieces)
        counted = pieces[-1].usage.get("completion_tokens", ids)
        if ids != counted:
            raise EngineFault(f"{_missing('token_ids')} ({ids} ids for {counted} tokens)", name=LIES)
        if not any(piece.prompt_ids is not None for piece in pieces):
            raise EngineFault(_missing("prompt_token_ids"), name=LIES)

    async def _ask(self, facts: EngineFacts) -> None:
        await self.describe(facts)
        for route in self._routes:
            facts.route = route
            try:
                await self._try(facts, route)
                break
            except EngineFault as fault:
                if route == self._routes[-1] or fault.name not in ("engine_error", LIES):
                    raise
        self._routes, self.takes_ids = (route,), route != CHAT

    async def _try(self, facts: EngineFacts, route: str) -> None:
        async def likeliest(temperature: float) -> float:
            return (await self._one_token(route, temperature))[0]

        _, facts.version = await self._one_token(route, 1.0)
        facts.returns_ids = facts.returns_logprobs = True
        # --logprobs-mode decides.
        self._mode = self._mode or await mode_of(likeliest, behind_top_k=True)
        facts.logprob_mode = self._mode

    async def _one_token(self, route: str, temperature: float) -> tuple[float, str | None]:
        """The logprob of the likeliest token, since top_k leaves no other, and the policy version."""
        sampling = {"max_tokens": 1, "temperature": temperature, "top_k": 1}
        call = EngineCall(rid=uuid.uuid4().hex, stream=False, sampling=sampling)
        if route == CHAT:
            call.messages = [{"role": "user", "content": "hi"}]
            pieces = [piece async for piece in super().generate(call)]
        else:
            call.prompt_ids = np.asarray(QUESTION, IDS)
            pieces = [piece async for piece in self._by_ids(call, route)]
        logprobs = next((piece.logprobs for piece in pieces if len(piece.ids)), None)
        if logprobs is None:
            raise EngineFault(_missing("logprobs"), name=LIES)
        return float(logprobs[0]), next((piece.versions[-1][2] for piece in pieces if piece.versions), None)

    async def _by_ids(self, call: EngineCall, route: str) -> AsyncIterator[Piece]:
        body = _token_request(call) if route == GENERATE else await self._completion_request(call)
        async with self.post(route, body) as response:
            finished = False
            if call.stream:
                async for document in self.events(response):
                    if document.get("choices"):
                        with readable():
                            piece = _piece(document["choices"][0])
                        finished = piece.finish_reason is not None
                        yield piece
            else:
                document = await self.document(response)
                with readable():
                    piece = _piece((document.get("choices") or [{}])[0])
                finished = piece.finish_reason is not None
                yield piece
            if not finished:
                raise EngineFault("the engine's answer has no finish_reason", name="engine_error")

    async def _completion_request(self, call: EngineCall) -> dict[str, Any]:
        asked = {"model": await self.model(), "prompt": _ids(call), "stream": call.stream, "return_token_ids": True}
        return asked | _sampling(call)


class VLLMChat(VLLM):
    """By chat completions whatever it offers: for a gateway that has no tokenizer of the model."""

    kind = "vllm_chat"

    def __init__(self, base_url: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        super().__init__(base_url, patience_seconds)
        self._routes = (CHAT,)


def _token_request(call: EngineCall) -> dict[str, Any]:
    return {"request_id": call.rid, "token_ids": _ids(call), "sampling_params": _sampling(call), "stream": call.stream}


def _ids(call: EngineCall) -> Any:
    assert call.prompt_ids is not None
    return ids_text(call.prompt_ids)


def _sampling(call: EngineCall) -> dict[str, Any]:
    values: dict[str, Any] = {**VLLM.defaults, **call.sampling, "logprobs": 0, "skip_special_tokens": False}
    if call.grammar is None:
        return values
    alone = call.grammar["type"] == "json_schema"
    tag = json.dumps({"type": "structural_tag", "format": call.grammar})
    return values | {"structured_outputs": {"json": call.grammar["json_schema"]} if alone else {"structural_tag": tag}}


def _piece(choice: dict[str, Any]) -> Piece:
    if choice.get("token_ids") is None:
        raise EngineFault(_missing("token_ids"), name=LIES)
    ids, told = ids_of(choice["token_ids"]), choice.get("logprobs") or {}
    values = told.get("token_logprobs") or [entry.get("logprob") for entry in told.get("content") or []]
    return Piece(
        ids=ids,
        logprobs=np.asarray(values, LOGPROBS) if len(values) == len(ids) else None,
        versions=[(span["start"], span["end"], span["version"]) for span in choice.get("weight_versions") or []],
        finish_reason=choice.get("finish_reason"),
        matched=choice.get("stop_reason"),
    )


def _missing(field: str) -> str:
    return (
        f"engine returns no `{field}`, without which nothing can be trained. It takes vLLM ≥ 0.10.2, and a router in "
        "between must pass unknown fields on: point base_url at the engine itself"
    )
