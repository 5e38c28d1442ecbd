"""The HTTP app: routes, the guard before them, and every error as `{detail}`."""

from __future__ import annotations

import json
import sqlite3

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from polar.server.core import Core, DiskFull, is_disk_full
from polar.server.guard import Guard
from polar.server.node_routes import node_routes
from polar.server.trainer_routes import trainer_routes


def create_app(core: Core) -> FastAPI:
    """The app of one core; it serves while `core.running()` is entered."""
    app = FastAPI(title="Polar rollout server", docs_url=None, redoc_url=None, routes=list(node_routes(core)))
    app.include_router(trainer_routes(core))
    app.add_middleware(Guard, core=core)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(DiskFull, _unsaved)
    app.add_exception_handler(OSError, _unsaved)
    app.add_exception_handler(sqlite3.Error, _unsaved)
    app.add_exception_handler(Exception, _broken)
    return app


def _invalid(request: Request, error: Exception) -> JSONResponse:
    """What was wrong and where, without the input: it may hold what JSON cannot."""
    assert isinstance(error, RequestValidationError)
    mistakes = [{"loc": item["loc"], "msg": item["msg"], "type": item["type"]} for item in error.errors()]
    return JSONResponse(json.loads(json.dumps({"detail": mistakes}, default=str)), 422)


def _unsaved(request: Request, error: Exception) -> JSONResponse:
    """507 for a full disk, 503 for another fault of it: whoever called may try again."""
    full = isinstance(error, DiskFull) or is_disk_full(error)
    return JSONResponse({"detail": f"cannot save: {error}"}, 507 if full else 503)


def _broken(request: Request, error: Exception) -> JSONResponse:
    """A mistake of ours; the traceback goes to the server's log."""
    return JSONResponse({"detail": f"internal error: {type(error).__name__}: {error}"}, 500)
