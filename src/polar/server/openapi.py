"""The description of the trainer-facing API, made from the records that routes answer and the requests they take."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from polar.config import TOKEN_HEADER
from polar.records import SessionResult, SessionSummary, TaskResult, TaskStatus
from polar.replies import Accepted, Health, InferenceStatus, Nodes, Problem, RolloutStatus, Sessions, Tasks
from polar.requests import TaskRequest
from polar.server import shapes

_REF = "#/components/schemas/{%s}"
_ANSWERS = (
    Accepted,
    Health,
    InferenceStatus,
    Nodes,
    Problem,
    RolloutStatus,
    SessionResult,
    SessionSummary,
    Sessions,
    TaskResult,
    TaskStatus,
    Tasks,
)


def describe(app: FastAPI, *, token_needed: bool) -> dict[str, Any]:
    """The OpenAPI document."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    token = {"type": "apiKey", "in": "header", "name": TOKEN_HEADER}
    document["components"] = {"schemas": _schemas(), "securitySchemes": {"control_token": token}}
    document["security"] = [{"control_token": []}] if token_needed else [{}, {"control_token": []}]
    return document


def _schemas() -> dict[str, Any]:
    _, answers = msgspec.json.schema_components(_ANSWERS, schema_hook=_array, ref_template=_REF % "name")
    task = TaskRequest.model_json_schema(ref_template=_REF % "model")
    requests = task.pop("$defs") | {"TaskRequest": task}
    shapes.narrow(requests)
    return dict(answers) | requests


def _array(kind: type) -> dict[str, Any]:
    if kind is not np.ndarray:
        raise NotImplementedError(f"no schema of a {kind}")
    return {"type": "array", "items": {"type": "number"}}
