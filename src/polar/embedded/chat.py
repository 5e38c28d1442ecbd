"""OpenAI's chat completions over the model's own chat template, with token ids where vLLM puts them.

`prompt_token_ids` stand beside the choices (in the first chunk of a stream), `token_ids` in each choice; the policy
version in `metadata.weight_version`. What is sampled and how is exactly what `/generate` does with the rendered ids.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from aiohttp import web
from jinja2 import TemplateError
from pydantic import BaseModel, ConfigDict, Field

from polar.embedded.batch import Sequence
from polar.embedded.engine import BadRequest, Engine, naming_fields, parse, stream
from polar.embedded.sampling import Sampling
from polar.embedded.scheduler import Update

# The fields of Sampling by the names that chat completions know them under.
RENAMED = {"max_tokens": "max_new_tokens", "max_completion_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


class Chat(BaseModel):
    model_config = ConfigDict(extra="allow")

    messages: list[dict[str, Any]] = Field(min_length=1)
    model: str = ""
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=20)
    return_token_ids: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False
    stream_options: dict[str, Any] = {}
    rid: str | None = None


def routes(engine: Engine) -> list[web.RouteDef]:
    async def chat(request: web.Request) -> web.StreamResponse:
        body = await parse(request, Chat)
        sequence = _sequence(engine, body)
        if body.stream:
            return await stream(request, _chunks(engine, sequence, body))
        update = await engine.last(sequence)
        message = {"role": "assistant", "content": engine.text(sequence, update)}
        choice = {"index": 0, "message": message, **_tokens(engine, sequence, body, 0, update)}
        ids = _prompt_ids(sequence, body)
        answer = _frame(sequence, body, "chat.completion") | {"choices": [choice], "usage": _usage(sequence, update)}
        return web.json_response(answer | ids | {"metadata": {"weight_version": update.weight_version}})

    return [web.post("/v1/chat/completions", chat)]


def _sequence(engine: Engine, body: Chat) -> Sequence:
    try:
        ids = engine.checkpoint.render(body.messages, tools=body.tools, add_generation_prompt=True)
    except TemplateError as error:
        raise BadRequest(f"messages: {error}") from error
    given = {RENAMED.get(name, name): value for name, value in body if value is not None}
    given |= {RENAMED.get(name, name): value for name, value in (body.model_extra or {}).items() if value is not None}
    room = engine.checkpoint.context_length - len(ids)
    with naming_fields():
        sampling = Sampling.model_validate({"max_new_tokens": max(room, 1)} | given)
    return engine.sequence("messages", ids, sampling, rid=body.rid, top=body.top_logprobs)


async def _chunks(engine: Engine, sequence: Sequence, body: Chat) -> AsyncGenerator[dict[str, Any], None]:
    tokens, text = 0, ""
    frame = _frame(sequence, body, "chat.completion.chunk")
    async with aclosing(engine.updates(sequence)) as updates:
        async for update in updates:
            version = {"metadata": {"weight_version": update.weight_version}}
            if not tokens:
                opening = {"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
                yield frame | {"choices": [opening]} | _prompt_ids(sequence, body) | version
            whole = engine.text(sequence, update)
            choice = {"index": 0, "delta": {"content": whole[len(text) :]}}
            yield frame | {"choices": [choice | _tokens(engine, sequence, body, tokens, update)]} | version
            tokens, text = update.tokens, whole
    if body.stream_options.get("include_usage"):
        yield frame | {"choices": [], "usage": _usage(sequence, update)}


def _frame(sequence: Sequence, body: Chat, kind: str) -> dict[str, Any]:
    return {"id": sequence.rid, "object": kind, "created": int(time.time()), "model": body.model}


def _prompt_ids(sequence: Sequence, body: Chat) -> dict[str, Any]:
    asked = body.return_token_ids or body.return_prompt_token_ids
    return {"prompt_token_ids": sequence.prompt_ids} if asked else {}


def _usage(sequence: Sequence, update: Update) -> dict[str, int]:
    prompt = len(sequence.prompt_ids)
    return {"prompt_tokens": prompt, "completion_tokens": update.tokens, "total_tokens": prompt + update.tokens}


def _tokens(engine: Engine, sequence: Sequence, body: Chat, since: int, update: Update) -> dict[str, Any]:
    """A choice's fields about the tokens from `since` on."""
    finish, places = update.finish or {}, range(since, update.tokens)
    fields: dict[str, Any] = {
        "finish_reason": finish.get("type"),
        "matched_stop": finish.get("matched"),
        "logprobs": None,
    }
    if body.return_token_ids:
        fields["token_ids"] = sequence.output_ids[since : update.tokens]
    if body.logprobs:
        fields["logprobs"] = {"content": [_logprob(engine, sequence, place) for place in places]}
    return fields


def _logprob(engine: Engine, sequence: Sequence, place: int) -> dict[str, Any]:
    tops = sequence.tops[place] if sequence.top_logprobs else []
    own = _named(engine, sequence.logprobs[place], sequence.output_ids[place])
    return own | {"top_logprobs": [_named(engine, logprob, token) for logprob, token in tops]}


def _named(engine: Engine, logprob: float, token: int) -> dict[str, Any]:
    text = engine.checkpoint.decode([token], skip_special_tokens=False)
    return {"token": text, "bytes": list(text.encode()), "logprob": logprob}
