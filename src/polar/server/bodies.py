"""A request's body as a JSON value that every part of the server can hold, or a refusal that names place and remedy."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice
from typing import Any

from fastapi import HTTPException
from fastapi.exceptions import RequestValidationError
from starlette.datastructures import Headers

DEEPEST = 64
"""levels of lists and objects in a body; each reader of JSON has some such bound"""
_MOST_MISTAKES = 100
Mistake = tuple[tuple[str | int, ...], str]


class _Twice(Exception):
    """An object has the same name twice."""


def check_type(headers: Headers) -> None:
    """Raises HTTPException 415."""
    kind = headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HTTPException(415, f"the body is {kind[:100]!r}: send the task as application/json")
    coding = headers.get("content-encoding", "identity").strip().lower()
    if coding != "identity":
        raise HTTPException(415, f"the body is encoded as {coding[:100]!r}: send it without Content-Encoding")


def parse(body: bytes) -> Any:
    """Raises RequestValidationError."""
    try:
        value = json.loads(body.decode(), object_pairs_hook=_object)
    except UnicodeDecodeError as error:
        raise refusal([((), f"not UTF-8 at byte {error.start}: send JSON in UTF-8")]) from error
    except json.JSONDecodeError as error:
        raise refusal([((), f"not JSON at line {error.lineno}, column {error.colno}: {error.msg}")]) from error
    except _Twice as error:
        raise refusal([((str(error),), "the name stands twice in one object: leave one out")]) from error
    except RecursionError as error:
        raise refusal([((), f"nested more than {DEEPEST} levels deep: flatten it")]) from error
    except ValueError as error:  # Python's bound on the digits of an integer
        raise refusal([((), f"a number has too many digits: {error}")]) from error
    if mistakes := list(islice(_unholdable(value), _MOST_MISTAKES)):
        raise refusal(mistakes)
    return value


def refusal(mistakes: list[Mistake]) -> RequestValidationError:
    """422 with the path of each field."""
    return RequestValidationError(
        [{"loc": ("body", *path), "msg": words, "type": "value_error"} for path, words in mistakes[:_MOST_MISTAKES]]
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise _Twice(Counter(name for name, _ in pairs).most_common(1)[0][0])
    return found


def _unholdable(whole: Any) -> Iterator[Mistake]:
    """One look at each value, since there may be millions."""
    left: list[tuple[Any, tuple[str | int, ...]]] = [([whole], ())]
    while left:
        holder, path = left.pop()
        if len(path) > DEEPEST:
            yield path[1:4], f"nested more than {DEEPEST} levels deep: flatten it"
            continue
        for key, value in holder.items() if type(holder) is dict else enumerate(holder):
            kind = type(value)
            if kind is float and not math.isfinite(value):
                yield (*path, key)[1:], "must be a finite number"
            elif kind is int and not -(2**63) <= value < 2**63:
                yield (*path, key)[1:], "must fit into 64 bits: in metadata send a larger integer as text"
            elif kind is dict or kind is list:
                left.append((value, (*path, key)))
