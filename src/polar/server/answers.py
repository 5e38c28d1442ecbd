"""How documents are answered: JSON, or msgpack where the caller accepts it; and how the API's description says so."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import Request, Response
from fastapi.concurrency import iterate_in_threadpool
from fastapi.responses import StreamingResponse

from polar.codec import in_pieces, to_json, to_msgpack
from polar.replies import Problem
from polar.server.files import Files
from polar.server.state import Task

if TYPE_CHECKING:
    from polar.server.core import Core

JSON, MSGPACK = "application/json", "application/msgpack"
PROBLEMS = {
    401: "the control token is missing or wrong",
    403: "called by a web page, or by a name that is not the server's, without the control token",
    404: "there is no such thing here",
    409: "as things stand it cannot be: the id is taken or was cancelled, the session is not over",
    413: "the body is too large",
    415: "the body is not plain JSON",
    422: "a value is wrong: `detail` names each field",
    503: "the server cannot save just now: try again",
    504: "not every gateway paused in time: all go on again",
    507: "the server's disk is full",
}
_PIECE = 256 << 10
_ALWAYS = (401, 403, 413, 503, 507)


def reply(request: Request, record: Any, headers: dict[str, str] | None = None) -> Response:
    if _wants_msgpack(request):
        return Response(to_msgpack(record), headers=headers, media_type=MSGPACK)
    return Response(to_json(record), headers=headers, media_type=JSON)


def reply_with_results(request: Request, record: msgspec.Struct, core: Core, task: Task) -> StreamingResponse:
    packed = _wants_msgpack(request)
    pieces = with_results(record, core.files, task, packed=packed)

    async def body() -> AsyncIterator[bytes]:
        with core.using(task.task_id):
            async for piece in iterate_in_threadpool(pieces):
                yield piece

    return StreamingResponse(body(), media_type=MSGPACK if packed else JSON)


def with_results(record: msgspec.Struct, files: Files, task: Task, *, packed: bool) -> Iterator[bytes]:
    """The record's document with the results there are now, in pieces that hold one large result or many small ones."""
    over = [session for session in task.sessions if session.status.terminal]
    return _gathered(
        in_pieces(record, "results", (files.result(session, task) for session in over), len(over), packed=packed)
    )


def _gathered(pieces: Iterator[bytes]) -> Iterator[bytes]:
    held = bytearray()
    for piece in pieces:
        held += piece
        if len(held) > _PIECE:
            yield bytes(held)
            held.clear()
    yield bytes(held)


def gives(kind: type, *problems: int) -> dict[str, Any]:
    """Arguments of a route's decorator: what it answers, beside the problems that every route may answer."""
    content = {media: {"schema": ref(kind)} for media in (JSON, MSGPACK)}
    return {"response_class": Response, "responses": {200: {"content": content}, **problems_of(*problems)}}


def problems_of(*statuses: int) -> dict[int | str, Any]:
    content = {JSON: {"schema": ref(Problem)}}
    known = sorted({*_ALWAYS, *statuses})
    return {status: {"description": PROBLEMS[status], "content": content} for status in known}


def ref(kind: type) -> dict[str, str]:
    return {"$ref": f"#/components/schemas/{kind.__name__}"}


def _wants_msgpack(request: Request) -> bool:
    return MSGPACK in request.headers.get("accept", "")
