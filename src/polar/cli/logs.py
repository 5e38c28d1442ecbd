"""Logging, configured once: to stderr, pretty on a terminal and key=value elsewhere; warnings and news only, unless
asked for more."""

from __future__ import annotations

import logging
import sys
from contextlib import suppress

import structlog


class _Stderr:
    """Whatever stderr is when something is logged. What it does not take (its disk is full, its reader has gone) is
    lost, and nothing else."""

    def write(self, text: str) -> None:
        with suppress(OSError):
            sys.stderr.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


_STDERR = _Stderr()


def configure(verbose: bool) -> None:
    level = logging.DEBUG if verbose else logging.INFO
    pretty = sys.stderr.isatty()
    renderer: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer(colors=True)
        if pretty
        else structlog.processors.LogfmtRenderer(key_order=["timestamp", "level", "event"], bool_as_flag=False)
    )
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="%H:%M:%S" if pretty else "iso", utc=not pretty),
            structlog.processors.format_exc_info if not pretty else structlog.processors.StackInfoRenderer(),
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *names: structlog.PrintLogger(_STDERR),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )
    logging.basicConfig(level=logging.DEBUG if verbose else logging.WARNING, stream=sys.stderr)
