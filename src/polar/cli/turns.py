"""A session's story for people: a pure rendering of its turns, its result and its times."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from polar.cli.console import grid, harmless
from polar.cli.results import number, reward, seconds, termination
from polar.cli.tokens import Decoder, sampled, visible
from polar.records import SessionResult, SessionTiming
from polar.sessionlog import SessionLog
from polar.trajectory.view import Fork, Turn

_STAGES = (
    ("queue", "register_to_init_queue_ms"),
    ("init", "init_ms"),
    ("ready", "ready_queue_ms"),
    ("run", "run_ms"),
    ("build", "build_ms"),
    ("evaluate", "eval_ms"),
    ("whole", "e2e_ms"),
)
_SOURCES = {"continued": "continued", "rendered": "rendered", "engine": "rendered by the engine"}


def heading(log: SessionLog, result: SessionResult | None) -> Iterator[Text]:
    header = log.header
    yield Text.assemble(
        (header.session_id, "bold"), f"  task {header.task_id} · attempt {header.attempt} · {header.model} on "
        f"{header.engine or 'an engine'}" + ("" if log.sealed else " · not sealed") + (" · torn" if log.torn else "")
    )  # fmt: skip
    if result is not None:
        yield from ending(result)


def ending(result: SessionResult) -> Iterator[Text]:
    yield Text(f"{result.status} ({termination(result)}) · reward {number(reward(result))} · {stages(result.timing)}")
    if result.error:
        yield Text(result.error, style="red")


def stages(timing: SessionTiming) -> str:
    parts = [(name, getattr(timing, field)) for name, field in _STAGES]
    return " · ".join(f"{name} {seconds(value)}" for name, value in parts if value is not None)


def table(turns: list[Turn]) -> Table:
    """One row a turn. Logprob: the mean over its sampled tokens."""
    shown = grid("turn", "context", ">prompt", ">kept", ">sampled", ">logprob", "ended", "trace", ">time")
    for turn in turns:
        shown.add_row(*_row(turn))
    return shown


def _row(turn: Turn) -> tuple[str, ...]:
    finite = turn.logprobs[np.isfinite(turn.logprobs)]
    ended = turn.finish_reason or "never"
    return (
        str(turn.call),
        _context(turn),
        str(turn.prompt_length),
        str(turn.kept) if turn.continues is not None else "",
        str(len(turn.ids)),
        f"{finite.mean():.2f}" if len(finite) else "none" if len(turn.ids) else "",
        ended if turn.delivered else f"{ended}, undelivered",
        f"{turn.trace}" if turn.trace is not None else f"none: {turn.excluded or 'nothing sampled'}",
        seconds(1000 * (turn.finished_at - turn.opened_at)) if turn.finished_at else "",
    )


def _context(turn: Turn) -> str:
    source = _SOURCES.get(turn.source or "", "no prompt")
    base = f" from {turn.continues}" if turn.continues is not None and turn.source == "continued" else ""
    return source + base + (f" ({turn.why})" if turn.why else "")


def forks(turns: list[Turn], decode: Decoder) -> Iterator[Text]:
    for turn in turns:
        if turn.fork is not None:
            yield Text(f"turn {turn.call} forks: {_fork(turn.fork, decode)}", style="yellow")
        if turn.leaves is not None:
            why = "an edited history, or another conversation"
            yield Text(f"turn {turn.call} continues no answer ({why}): {_fork(turn.leaves, decode)}", style="yellow")


def _fork(fork: Fork, decode: Decoder) -> str:
    was, now = (_token(token, decode) for token in (fork.expected_id, fork.prompt_id))
    return f"at position {fork.position} it has {now}, where turn {fork.expected_call} had {was}"


def _token(token: int | None, decode: Decoder) -> str:
    return "nothing" if token is None else f"{visible(decode([token])[0])!r} (id {token})"


def spelled(turns: list[Turn], decode: Decoder) -> Iterator[Text]:
    """The sampled tokens of each turn, coloured; behind what is new in its prompt, plain and dim."""
    for turn in turns:
        yield Text(f"── turn {turn.call}" + (f", trace {turn.trace}" if turn.trace is not None else ""), style="bold")
        if len(turn.new_ids):
            yield Text(harmless("".join(decode(turn.new_ids.tolist()))), style="dim")
        yield sampled(turn.ids.tolist(), turn.logprobs.tolist(), turn.trace is not None, decode)


def refusals(log: SessionLog) -> Iterator[Text]:
    for refused in log.refusals:
        yield Text(harmless(f"refused ({refused.dialect}, {refused.reason}): {refused.detail}"), style="yellow")


def harness_log(result: SessionResult, lines: int) -> Iterator[Text]:
    tail = str(result.metadata.get("harness_log") or "").rstrip().splitlines()[-lines:]
    if tail:
        yield Text("the harness's last lines", style="bold")
        yield Text(harmless("\n".join(tail)), style="dim")


def document(log: SessionLog, result: SessionResult | None, turns: list[Turn], decode: Decoder) -> dict[str, Any]:
    """What `--json` prints: the same facts, ids and logprobs as lists, and the texts of the ids."""
    return {
        "session_id": log.header.session_id,
        "task_id": log.header.task_id,
        "attempt": log.header.attempt,
        "status": result.status if result else None,
        "termination": termination(result) if result else None,
        "reward": reward(result) if result else None,
        "error": result.error if result else None,
        "timing": result.timing if result else None,
        "turns": turns,
        "texts": [decode(turn.ids.tolist()) for turn in turns],
        "refusals": log.refusals,
        "harness_log": result.metadata.get("harness_log") if result else None,
    }
