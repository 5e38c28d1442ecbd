"""SGLang's `/generate`: token ids in, sampled ids and their logprobs out, whole or streamed."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web
from pydantic import BaseModel

from polar.embedded.batch import Sequence
from polar.embedded.engine import BadRequest, Engine, parse, stream
from polar.embedded.sampling import Sampling
from polar.embedded.scheduler import Update


class Generate(BaseModel):
    input_ids: list[int] | None = None
    text: str | None = None
    sampling_params: Sampling = Sampling()
    return_logprob: bool = False
    stream: bool = False
    rid: str | None = None


def routes(engine: Engine) -> list[web.RouteDef]:
    async def generate(request: web.Request) -> web.StreamResponse:
        body = await parse(request, Generate)
        sequence = engine.sequence(*_prompt(engine, body), body.sampling_params, rid=body.rid)
        if body.stream:
            return await stream(request, _events(engine, sequence, body.return_logprob))
        update = await engine.last(sequence)
        return web.json_response(_answer(engine, sequence, update, body.return_logprob))

    return [web.post("/generate", generate)]


def _prompt(engine: Engine, body: Generate) -> tuple[str, list[int]]:
    if body.input_ids is not None:
        return "input_ids", body.input_ids
    if body.text is not None:
        return "text", engine.checkpoint.tokenizer.encode(body.text, add_special_tokens=False).ids
    raise BadRequest("input_ids: is missing (text may stand instead)")


async def _events(engine: Engine, sequence: Sequence, logprobs: bool) -> AsyncGenerator[dict[str, Any], None]:
    """Each says everything so far; with --incremental-streaming-output only what is new."""
    tokens, text = 0, ""
    async with aclosing(engine.updates(sequence)) as updates:
        async for update in updates:
            answer = _answer(engine, sequence, update, logprobs, since=tokens)
            if engine.incremental:
                tokens, text, answer["text"] = update.tokens, answer["text"], answer["text"][len(text) :]
            yield answer


def _answer(engine: Engine, sequence: Sequence, update: Update, logprobs: bool, since: int = 0) -> dict[str, Any]:
    ids = sequence.output_ids[since : update.tokens]
    meta: dict[str, Any] = {
        "id": sequence.rid,
        "finish_reason": update.finish,
        "prompt_tokens": len(sequence.prompt_ids),
        "completion_tokens": update.tokens,
        "cached_tokens": 0,
        "weight_version": update.weight_version,
    }
    if logprobs:
        of_ids = zip(sequence.logprobs[since : update.tokens], ids, strict=True)
        meta["output_token_logprobs"] = [[logprob, token, None] for logprob, token in of_ids]
    return {"text": engine.text(sequence, update), "output_ids": ids, "meta_info": meta}
