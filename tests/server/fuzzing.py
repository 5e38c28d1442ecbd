"""Hooks of the API's fuzz: msgpack is read like JSON, and each valid task has an id of its own."""

from __future__ import annotations

from itertools import count
from typing import Any

import schemathesis

from polar.codec import from_msgpack, to_builtins

_numbers = count()


@schemathesis.deserializer("application/msgpack")
def msgpack(context: schemathesis.DeserializationContext, response: schemathesis.Response) -> Any:
    return to_builtins(from_msgpack(response.content, Any))


@schemathesis.hook
def before_call(context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]) -> None:
    if isinstance(case.body, dict) and case.body.get("task_id") == "hello":
        case.body["task_id"] = f"hello-{next(_numbers)}"
