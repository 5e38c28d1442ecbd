"""Data goes to stdout, everything said to a person about trouble or progress to stderr; an error names the mistake
and what to do about it, and its exit code says whose it is."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from enum import IntEnum
from typing import Any

import typer
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

from polar.codec import to_json

_PIPE_WIDTH = 1000


class ExitCode(IntEnum):
    OK = 0
    FAILED = 1
    USAGE = 2
    UNREACHABLE = 3
    INTERRUPTED = 130


def out() -> Console:
    """Made at each use, so that it writes where stdout points now. What goes into a pipe is never folded."""
    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else _PIPE_WIDTH
    return Console(highlight=False, soft_wrap=True, width=width)


def err() -> Console:
    return Console(stderr=True, highlight=False, soft_wrap=True)


_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\n\t"} | dict.fromkeys(
    range(127, 160), "�"
)


def harmless(text: str) -> str:
    """What an agent wrote, for a terminal: its control characters are shown, not obeyed."""
    return text.translate(_PICTURES)


def say(message: str, style: str = "") -> None:
    """One line for a person, on stderr; one that finds no room there is lost."""
    with suppress(OSError):
        err().print(Text(harmless(message), style=style))


def print_json(document: Any) -> None:
    """One line of JSON on stdout; records and arrays as the public API writes them."""
    sys.stdout.write(to_json(document).decode() + "\n")
    sys.stdout.flush()


def stop(message: str, code: ExitCode) -> typer.Exit:
    """Says what is wrong; to be raised: `raise stop("…", ExitCode.USAGE)`."""
    err().print(Text("error: ", style="bold red") + Text(harmless(message)))
    return typer.Exit(int(code))


def grid(*columns: str) -> Table:
    """A plain table; a column whose name starts with > is set to the right. The first, a name to copy, is whole."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for at, name in enumerate(columns):
        justify: JustifyMethod = "right" if name.startswith(">") else "left"
        table.add_column(name.removeprefix(">"), justify=justify, overflow="fold", no_wrap=at == 0)
    return table
