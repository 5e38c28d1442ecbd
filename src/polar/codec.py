"""One way to write records: msgpack with packed arrays for machines, JSON with lists of numbers for people.

A float that JSON cannot hold (NaN, infinities) becomes null, as msgspec does; arrays follow the same rule.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, TypeVar

import msgspec
import numpy as np

T = TypeVar("T")

_CODES: dict[np.dtype[Any], int] = {np.dtype(np.int32): 1, np.dtype(np.float32): 2, np.dtype(np.uint8): 3}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.ndarray) and value.dtype in _CODES and value.ndim == 1:
        return msgspec.msgpack.Ext(_CODES[value.dtype], value.tobytes())
    return _plain(value)


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"cannot encode a {type(value).__name__}")


def _unpack_array(code: int, data: memoryview) -> Any:
    if code not in _DTYPES:
        raise msgspec.ValidationError(f"unknown array code {code}")
    return np.frombuffer(bytes(data), dtype=_DTYPES[code])


def _decode_array(kind: type, value: Any) -> Any:
    if kind is not np.ndarray:
        raise NotImplementedError(f"cannot decode a {kind}")
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, list) and all(isinstance(item, int | float) and not isinstance(item, bool) for item in value):
        return np.asarray(value)
    raise ValueError("expected a list of numbers")


_msgpack = msgspec.msgpack.Encoder(enc_hook=_pack_array)
_json = msgspec.json.Encoder(enc_hook=_plain)


def to_msgpack(record: Any) -> bytes:
    return _msgpack.encode(record)


def to_json(record: Any) -> bytes:
    try:
        return _json.encode(record)
    except (TypeError, NotImplementedError):  # a map whose keys JSON has no form for: None, pairs, …
        return _json.encode(_with_text_keys(to_builtins(record)))


def _with_text_keys(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _with_text_keys(item) for key, item in value.items()}
    return list(map(_with_text_keys, value)) if isinstance(value, list | tuple) else value


def in_pieces(record: msgspec.Struct, field: str, items: Iterable[Any], count: int, *, packed: bool) -> Iterator[bytes]:
    """The document of `record` with `count` items as its list `field`, of which one at a time is in memory."""
    head = {name: getattr(record, name) for name in record.__struct_fields__ if name != field}
    if packed:
        start = to_msgpack(head)  # of at most 14 fields: the first byte is 0x80 + their number
        yield bytes([start[0] + 1]) + start[1:] + to_msgpack(field) + to_msgpack([None] * count)[: -count or None]
        yield from map(to_msgpack, items)
    else:
        yield to_json(head)[:-1] + b"," + to_json(field) + b":["
        for at, item in enumerate(items):
            yield (b"," if at else b"") + to_json(item)
        yield b"]}"


def to_builtins(record: Any) -> Any:
    """Plain dicts, lists and numbers, as the JSON document would have them."""
    return msgspec.to_builtins(record, enc_hook=_plain)


@cache
def _msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    return msgspec.msgpack.Decoder(kind, ext_hook=_unpack_array, dec_hook=_decode_array)


_WRONG = (ValueError, OverflowError, RecursionError)
"""what numbers, arrays and nesting raise that no record can hold"""


def from_msgpack(data: bytes | memoryview, kind: type[T]) -> T:
    """Raises msgspec.ValidationError (naming the field's path) or DecodeError."""
    try:
        return _msgpack_decoder(kind).decode(data)  # type: ignore[arg-type]
    except msgspec.MsgspecError:
        raise
    except _WRONG as error:
        raise msgspec.ValidationError(str(error)) from error


def from_json(data: bytes | str, kind: type[T]) -> T:
    """Raises msgspec.ValidationError (naming the field's path) or DecodeError."""
    try:
        return msgspec.json.decode(data, type=kind, dec_hook=_decode_array)
    except msgspec.MsgspecError:
        raise
    except _WRONG as error:
        raise msgspec.ValidationError(str(error)) from error
