"""SGLang by chat completions, for a gateway that has no tokenizer of the model: it renders the prompt, and says which
ids it used, each version in other fields. Versions that say them in no stream (up to 0.5.22) are why it is always asked
for whole answers.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from typing import Any, ClassVar

import msgspec
import numpy as np

from polar.errors import EngineFault
from polar.protocols import EngineCall, EngineFacts, Piece
from polar.proxy.engines.http import ids_of
from polar.proxy.engines.openai import ROUTE, OpenAI, Tokens, aligned
from polar.proxy.engines.probing import LIES, mode_of
from polar.records import LOGPROBS

_ASKED = (
    *("return_prompt_token_ids", "return_meta_info"),  # since 0.5.13
    "return_token_ids",  # since 0.5.18
    *("return_input_ids_in_sglext", "return_output_ids_in_sglext"),  # since 0.5.23
)


class SGLangChat(OpenAI):
    kind = "sglang_chat"
    extras: ClassVar[Mapping[str, Any]] = {"logprobs": True, "top_logprobs": 1} | dict.fromkeys(_ASKED, True)
    # What is not said SGLang takes from the model's generation_config.json.
    defaults: ClassVar[Mapping[str, Any]] = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}

    async def generate(self, call: EngineCall) -> AsyncIterator[Piece]:
        async for piece in super().generate(msgspec.structs.replace(call, stream=False)):
            yield piece

    def tokens(self, document: dict[str, Any], choice: dict[str, Any]) -> Tokens:
        told, more = choice.get("meta_info") or {}, document.get("sglext") or choice.get("sglext") or {}
        prompt = document.get("prompt_token_ids") or choice.get("prompt_token_ids") or _first(more.get("input_ids"))
        entries = told.get("output_token_logprobs")
        if entries is not None:
            return Tokens(ids_of([entry[1] for entry in entries]), _floats([entry[0] for entry in entries]), prompt)
        listed = choice.get("response_token_ids") or choice.get("token_ids") or _first(more.get("output_ids"))
        ids = ids_of(listed or [])
        return Tokens(ids, aligned(choice, len(ids)), prompt)

    def check(self, pieces: list[Piece]) -> None:
        ids, told = sum(len(piece.ids) for piece in pieces), pieces[-1].usage.get("completion_tokens", 0)
        if ids != told:
            raise EngineFault(f"{_MISSING.format('token ids')} ({ids} ids for {told} tokens)", name=LIES)
        if not any(piece.prompt_ids is not None for piece in pieces):
            raise EngineFault(_MISSING.format("ids of the prompt"), name=LIES)

    async def _ask(self, facts: EngineFacts) -> None:
        await self.describe(facts)
        question = [{"role": "user", "content": "hi"}]
        call = EngineCall(rid="", stream=False, messages=question, sampling={"max_tokens": 1, "temperature": 1.0})
        pieces = [piece async for piece in self.generate(call)]
        facts.version, facts.returns_ids, facts.grammars = pieces[-1].version, True, True
        if not all(piece.logprobs is not None for piece in pieces if len(piece.ids)):
            raise EngineFault(_MISSING.format("logprobs that match the token ids"), name=LIES)
        facts.returns_logprobs = True
        facts.logprob_mode = self._mode = self._mode or await mode_of(self._likeliest, behind_top_k=False)

    async def _likeliest(self, temperature: float) -> float | None:
        question = [{"role": "user", "content": "hi"}]
        body = {"model": await self.model(), "messages": question, "max_tokens": 1, "temperature": temperature}
        async with self.post(ROUTE, body | {"logprobs": True, "top_logprobs": 1}) as response:
            choice = ((await self.document(response)).get("choices") or [{}])[0]
        entries = (choice.get("logprobs") or {}).get("content") or [{}]
        likeliest = entries[0].get("top_logprobs") or [{}]
        return likeliest[0].get("logprob")


_MISSING = (
    "engine returns no {} with chat completions. SGLang does from 0.5.13 on, and its router drops what asks for them: "
    "point base_url at the engine itself, or take the kind sglang, which needs the model's tokenizer"
)


def _first(lists: Any) -> Any:
    """Of one list a choice, the only choice's."""
    return lists[0] if lists and isinstance(lists[0], list) else lists


def _floats(values: list[float | None]) -> np.ndarray:
    return np.asarray(values, LOGPROBS)
