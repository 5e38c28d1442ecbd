"""vLLM's chat completions with token ids: the engine renders the prompt and says which ids it used."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from polar.errors import EngineFault
from polar.protocols import EngineFacts, Piece
from polar.proxy.engines.openai import OpenAI

_LIES = "engine_lies"


class VLLM(OpenAI):
    kind = "vllm"
    # top_logprobs null would turn logprobs off (case 14).
    extras: ClassVar[Mapping[str, Any]] = {"return_token_ids": True, "logprobs": True, "top_logprobs": 0}

    def check(self, pieces: list[Piece]) -> None:
        ids = sum(len(piece.ids) for piece in pieces)
        counted = pieces[-1].usage.get("completion_tokens", ids)
        if ids != counted:
            raise EngineFault(f"{_missing('token_ids')} ({ids} ids for {counted} tokens)", name=_LIES)
        if not any(piece.prompt_ids is not None for piece in pieces):
            raise EngineFault(_missing("prompt_token_ids"), name=_LIES)

    async def _sample_one(self, facts: EngineFacts) -> None:
        await super()._sample_one(facts)
        # The server's --logprobs-mode decides, and no answer tells which it is.
        facts.logprob_mode = None


def _missing(field: str) -> str:
    return (
        f"engine returns no token ids: field `{field}` is absent. It asks for vLLM ≥ 0.10.2 (return_token_ids), and a "
        "router in between must pass unknown fields on: point base_url at the engine itself"
    )
