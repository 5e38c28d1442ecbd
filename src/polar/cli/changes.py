"""What became of each stored session that was built or scored anew, beside what it was: figures only, whatever their
number. A session that failed is named with why, and makes the exit code 1."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec
from rich.progress import track
from rich.table import Table
from rich.text import Text

from polar.cli.console import ExitCode, err, grid, harmless, out, print_json
from polar.cli.results import mean, number, reward, tokens
from polar.records import SessionResult


class Figures(msgspec.Struct, kw_only=True, frozen=True):
    """sampled = trainable + Σ excluded."""

    traces: int
    sampled: int
    trainable: int
    excluded: dict[str, int]
    reward: float | None


class Change(msgspec.Struct, kw_only=True):
    """`before`, `after`: None where there is no trajectory. `what`: same (to the byte), changed, scored, kept (it is as
    it was: `why` tells what it ended as), or failed."""

    session_id: str
    task_id: str
    what: str
    before: Figures | None = None
    after: Figures | None = None
    why: str | None = None


def figures(result: SessionResult) -> Figures | None:
    if result.trajectory is None:
        return None
    ledger = tokens(result)
    return Figures(
        traces=len(result.trajectory.traces),
        sampled=ledger.get("sampled", 0),
        trainable=ledger.get("trainable", 0),
        excluded=ledger.get("excluded", {}),
        reward=reward(result),
    )


def in_progress(work: Iterable[Change], total: int, doing: str) -> list[Change]:
    """All changes; meanwhile a terminal shows how far it is."""
    return list(track(work, doing, total, console=err(), transient=True, disable=not err().is_terminal))


def report(changes: list[Change], *, tokens: bool, saved: Path | None, json: bool) -> ExitCode:
    """Prints them, with their totals; `tokens` False leaves the columns out in which nothing can have changed."""
    failed = [change for change in changes if change.what == "failed"]
    before, after = (_total(sides) for sides in ([row.before for row in changes], [row.after for row in changes]))
    if json:
        totals = {"before": before, "after": after, "failed": len(failed)}
        print_json({"sessions": changes, "totals": totals, "saved": saved and str(saved)})
    else:
        total = Change(session_id="all", task_id="", what="", before=before, after=after)
        out().print(_table(changes, total, tokens))
        for change in failed:
            out().print(Text(harmless(f"{change.session_id}: {change.why}"), style="red"))
        if saved:
            out().print(f"saved: {saved}")
    return ExitCode.FAILED if failed else ExitCode.OK


def _total(sides: Iterable[Figures | None]) -> Figures:
    known = [side for side in sides if side is not None]
    excluded: Counter[str] = Counter()
    for side in known:
        excluded.update(side.excluded)
    return Figures(
        traces=sum(side.traces for side in known),
        sampled=sum(side.sampled for side in known),
        trainable=sum(side.trainable for side in known),
        excluded=dict(excluded),
        reward=mean(side.reward for side in known),
    )


def _table(changes: list[Change], total: Change, tokens: bool) -> Table:
    columns = (">traces", ">sampled", ">trainable", "excluded") if tokens else (">traces",)
    table = grid("session", *columns, ">reward", "")
    for change in changes:
        table.add_row(change.session_id, *_cells(change, tokens), _what(change))
    if len(changes) > 1:
        table.add_row("all", *_cells(total, tokens), f"{len(changes)} sessions", style="bold")
    return table


def _what(change: Change) -> str:
    return f"{change.what}: {change.why}" if change.what == "kept" else change.what


def _cells(change: Change, tokens: bool) -> Iterator[str]:
    sides = [_shown(side, tokens) for side in (change.before, change.after)]
    for before, after in zip(*sides, strict=True):
        yield after if before == after else f"{before} → {after}"


def _shown(side: Figures | None, tokens: bool) -> list[str]:
    if side is None:
        return ["–"] * (5 if tokens else 2)
    excluded = ", ".join(f"{count} {reason}" for reason, count in side.excluded.items() if count)
    counts = [str(side.traces), str(side.sampled), str(side.trainable), excluded or "0"]
    return [*(counts if tokens else counts[:1]), number(side.reward)]
