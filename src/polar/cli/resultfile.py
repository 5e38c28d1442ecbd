"""Files of SessionResults, whole or not there, written and read one result at a time. The name's ending is the format:
`.json` one list, `.jsonl` one result a line, `.msgpack` one list with token arrays packed."""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import msgspec

from polar.codec import from_json, from_msgpack, to_json, to_msgpack
from polar.errors import ConfigError, from_os_error
from polar.records import SessionResult

Write = Callable[[SessionResult], None]
Items = list[msgspec.Raw]
_LONG_LIST = b"\xdd"
"""msgpack: a list whose length is the next four bytes"""


class _Form(msgspec.Struct, frozen=True):
    start: bytes
    between: bytes
    end: bytes
    encode: Callable[[Any], bytes]
    split: Callable[[Any], Items]
    decode: Callable[[Any, type[Any]], Any]


_FORMS = {
    ".json": _Form(b"[\n", b",\n", b"\n]\n", to_json, msgspec.json.Decoder(Items).decode, from_json),
    ".jsonl": _Form(b"", b"\n", b"\n", to_json, msgspec.json.Decoder(msgspec.Raw).decode_lines, from_json),
    ".msgpack": _Form(_LONG_LIST + bytes(4), b"", b"", to_msgpack, msgspec.msgpack.Decoder(Items).decode, from_msgpack),
}


def _form(path: Path, option: str) -> _Form:
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder: name a file, such as {path / 'results.jsonl'}")
    if path.suffix not in _FORMS:
        raise ConfigError(f"{option} {path}: the format is the name's ending, one of {', '.join(_FORMS)}")
    return _FORMS[path.suffix]


@contextmanager
def writing(path: Path | None) -> Iterator[Write]:
    """`path` is there when the block has ended without an exception. Raises ConfigError before it begins where nothing
    can be written there, ServerFault (`disk_full`) later."""
    if path is None:
        yield lambda result: None
        return
    form, partial = _form(path, "--out"), path.with_name(path.name + ".part")
    try:
        file = partial.open("wb")
    except OSError as error:
        raise ConfigError(f"--out {path} cannot be written: {error.strerror}") from error
    try:
        with file:
            yield from _written(file, form)
        partial.rename(path)
    except OSError as error:
        raise from_os_error(error, f"writing {path}") from error
    finally:
        partial.unlink(missing_ok=True)


def _written(file: IO[bytes], form: _Form) -> Iterator[Write]:
    count = 0

    def write(result: SessionResult) -> None:
        nonlocal count
        file.write((form.between if count else b"") + form.encode(result))
        count += 1

    file.write(form.start)
    yield write
    file.write(form.end)
    if form.start.startswith(_LONG_LIST):
        file.seek(len(_LONG_LIST))
        file.write(struct.pack(">I", count))


class _Line(msgspec.Struct):
    """A TaskResult has several; a SessionResult has none."""

    results: list[SessionResult] | None = None


def reading(path: Path) -> tuple[int, Iterator[SessionResult]]:
    """How many entries there are, and their results; a TaskResult (as `polar run --save` writes) has all of its own.
    Raises ConfigError, also while the results are gone through."""
    form = _form(path, "--in")
    try:
        with path.open("rb") as file:
            items = form.split(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError as error:
        raise ConfigError(f"--in {path} cannot be read: {error.strerror}") from error
    except (ValueError, msgspec.MsgspecError) as error:
        raise ConfigError(f"--in {path} is no file of results: {error}") from error
    return len(items), _results(path, form, items)


def _results(path: Path, form: _Form, items: Items) -> Iterator[SessionResult]:
    for at, item in enumerate(items):
        data = memoryview(item)
        try:
            several = form.decode(data, _Line).results
            yield from [form.decode(data, SessionResult)] if several is None else several
        except msgspec.MsgspecError as error:
            raise ConfigError(f"--in {path}: entry {at + 1} is no result: {error}") from error
