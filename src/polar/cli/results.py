"""Numbers of a result that several commands show; None where there is none, never 0."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polar.records import SessionResult


def reward(result: SessionResult) -> float | None:
    """Mean over the traces that have one."""
    traces = result.trajectory.traces if result.trajectory else []
    return mean(trace.reward for trace in traces)


def mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def tokens(result: SessionResult) -> dict[str, Any]:
    """The ledger; empty where nothing was built."""
    return dict(result.trajectory.metadata.get("tokens") or {}) if result.trajectory else {}


def termination(result: SessionResult) -> str:
    return str(result.metadata.get("termination") or result.status.lower())


def number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3g}"


def seconds(milliseconds: float | None) -> str:
    if milliseconds is None:
        return ""
    return f"{milliseconds:.0f} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.1f} s"
