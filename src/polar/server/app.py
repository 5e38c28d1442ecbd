"""The HTTP app: routes, the guard before them, its own description, and every error as `{detail}`."""

from __future__ import annotations

import json
import sqlite3
from functools import cache
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.requests import ClientDisconnect
from starlette.routing import Match

from polar.server.core import Core, DiskFull, is_disk_full
from polar.server.fleet_routes import add_fleet_routes
from polar.server.guard import Guard, needs_token
from polar.server.list_routes import add_list_routes
from polar.server.node_routes import node_routes
from polar.server.openapi import describe
from polar.server.trainer_routes import add_task_routes

_LONGEST_NAME = 200


def create_app(core: Core) -> FastAPI:
    """The app of one core; it serves while `core.running()` is entered."""
    app = FastAPI(title="Polar rollout server", openapi_url=None, routes=list(node_routes(core)))
    for add_routes in (add_task_routes, add_list_routes, add_fleet_routes):
        add_routes(app.router, core)
    app.get("/openapi.json", include_in_schema=False)(_description(app, core))
    app.add_middleware(Guard, core=core)
    app.add_exception_handler(405, _not_allowed)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(DiskFull, _unsaved)
    app.add_exception_handler(OSError, _unsaved)
    app.add_exception_handler(sqlite3.Error, _unsaved)
    app.add_exception_handler(ClientDisconnect, _gone)
    app.add_exception_handler(Exception, _broken)
    return app


def _description(app: FastAPI, core: Core) -> Any:
    document = cache(lambda: describe(app, token_needed=needs_token(core.settings)))

    def openapi() -> JSONResponse:
        return JSONResponse(document())

    return openapi


def _not_allowed(request: Request, error: Exception) -> JSONResponse:
    """Allow has the methods of every route of the path, not only of the first; of the path itself, where it is one."""
    routes = [route for route in request.app.routes if route.matches(request.scope)[0] is not Match.NONE]
    routes = [route for route in routes if route.path == request.url.path] or routes
    allowed = ", ".join(sorted({method for route in routes for method in route.methods}))
    return JSONResponse(
        {"detail": f"{request.method} is not for this path: it takes {allowed}"}, 405, {"Allow": allowed}
    )


def _gone(request: Request, error: Exception) -> Response:
    """Whoever sent the body went in the middle of it; nobody reads this."""
    return Response(status_code=400)


def _invalid(request: Request, error: Exception) -> Response:
    """What was wrong and where, without the input: it may hold what JSON cannot."""
    assert isinstance(error, RequestValidationError)
    mistakes = [
        {"loc": [_short(part) for part in item["loc"]], "msg": item["msg"], "type": item["type"]}
        for item in error.errors()
    ]
    return Response(json.dumps({"detail": mistakes}, default=str), 422, media_type="application/json")


def _short(part: str | int) -> str | int:
    return part if isinstance(part, int) else part[:_LONGEST_NAME]


def _unsaved(request: Request, error: Exception) -> JSONResponse:
    """507 for a full disk, 503 for another fault of it: whoever called may try again."""
    full = isinstance(error, DiskFull) or is_disk_full(error)
    return JSONResponse({"detail": f"cannot save: {error}"}, 507 if full else 503)


def _broken(request: Request, error: Exception) -> JSONResponse:
    """A mistake of ours; the traceback goes to the server's log."""
    return JSONResponse({"detail": f"internal error: {type(error).__name__}: {error}"}, 500)
