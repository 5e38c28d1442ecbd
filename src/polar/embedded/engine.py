"""What the routes share: a checked request becomes a sequence, its updates become text and logprobs."""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from aiohttp import web
from pydantic import BaseModel, ValidationError

from polar.embedded.batch import Sequence
from polar.embedded.checkpoint import Checkpoint
from polar.embedded.sampling import Sampling
from polar.embedded.scheduler import Scheduler, Update

Body = TypeVar("Body", bound=BaseModel)


class BadRequest(ValueError):
    """The message names the field."""


@dataclass(frozen=True)
class Engine:
    checkpoint: Checkpoint
    scheduler: Scheduler
    incremental: bool

    def sequence(self, field: str, ids: list[int], sampling: Sampling, *, rid: str | None, top: int = 0) -> Sequence:
        """Raises BadRequest where ids or lengths are outside the model's."""
        limit, size = self.checkpoint.context_length, self.checkpoint.vocab_size
        if not ids:
            raise BadRequest(f"{field}: must hold at least one token")
        for name, tokens in ((field, ids), ("sampling_params.stop_token_ids", sampling.stop_token_ids or [])):
            outside = [token for token in tokens if not 0 <= token < size]
            if outside:
                raise BadRequest(f"{name}: token id {outside[0]} is outside the vocabulary of {size}")
        if len(ids) >= limit:
            raise BadRequest(
                f"{field}: The input ({len(ids)} tokens) is longer than the model's context length ({limit} tokens)."
            )
        asked = len(ids) + sampling.max_new_tokens
        if asked > limit:
            raise BadRequest(
                f"max_new_tokens: Requested token count exceeds the model's maximum context length of {limit} tokens. "
                f"You requested a total of {asked} tokens: {len(ids)} tokens from the input messages and "
                f"{sampling.max_new_tokens} tokens for the completion."
            )
        seed = secrets.randbits(64) if sampling.seed is None else sampling.seed
        return Sequence(rid or secrets.token_hex(16), ids, sampling, seed, top)

    async def updates(self, sequence: Sequence) -> AsyncGenerator[Update, None]:
        """Ends behind the update that has a finish. However it ends, the sequence no longer runs afterwards."""
        try:
            updates = self.scheduler.submit(sequence)
        except ValueError as error:
            raise BadRequest(str(error)) from error
        try:
            while True:
                update = await updates.get()
                yield update
                if update.finish:
                    return
        finally:
            self.scheduler.forget(sequence.rid)

    async def last(self, sequence: Sequence) -> Update:
        async with aclosing(self.updates(sequence)) as updates:
            async for update in updates:
                if update.finish:
                    return update
        raise AssertionError("updates end with a finish")

    def text(self, sequence: Sequence, update: Update) -> str:
        """The text so far, without the stop that ended it (unless no_stop_trim) and without half a character."""
        sampling, ids = sequence.sampling, sequence.output_ids[: update.tokens]
        matched = None if sampling.no_stop_trim else (update.finish or {}).get("matched")
        if isinstance(matched, int):
            ids = ids[:-1]
        text = self.checkpoint.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
        return (
            text.split(matched, 1)[0] if isinstance(matched, str) else text if update.finish else text.rstrip("\ufffd")
        )


async def parse(request: web.Request, model: type[Body]) -> Body:
    """Raises BadRequest naming each wrong field."""
    with naming_fields():
        return model.model_validate_json(await request.read() or b"{}")


@contextmanager
def naming_fields() -> Iterator[None]:
    """What pydantic refuses becomes a BadRequest."""
    try:
        yield
    except ValidationError as error:
        problems = [(".".join(map(str, e["loc"])) or "body", e["msg"]) for e in error.errors(include_url=False)]
        raise BadRequest("; ".join(f"{where}: {what}" for where, what in problems)) from error


async def stream(request: web.Request, events: AsyncGenerator[dict[str, Any], None]) -> web.StreamResponse:
    """Server-sent events, ended by [DONE]. A first event that cannot be made is still a plain error."""
    async with aclosing(events):
        first = await anext(events)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        await response.write(_event(first))
        async for event in events:
            await response.write(_event(event))
    await response.write(b"data: [DONE]\n\n")
    return response


@web.middleware
async def errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Bad requests as SGLang's and OpenAI's clients both understand them."""
    try:
        return await handler(request)
    except BadRequest as error:
        return refusal(str(error))


def refusal(message: str) -> web.Response:
    body = {"message": message, "type": "BadRequestError", "param": message.partition(":")[0], "code": 400}
    return web.json_response({"object": "error", **body, "error": body}, status=400)


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value, separators=(",", ":")).encode() + b"\n\n"
