"""`polar doctor`: asks the engine and the machine what they can do, and says what to do about each thing that fails."""

from __future__ import annotations

import asyncio
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from polar.cli import logs
from polar.cli.console import ExitCode, grid, out, print_json
from polar.cli.options import ENGINE_KINDS, Json, Verbose
from polar.protocols import EngineFacts


class Check(msgspec.Struct, frozen=True):
    """`ok` None: not decided, or not needed. `advice` is what to do where it is not ok."""

    subject: str
    what: str
    ok: bool | None
    found: str
    advice: str = ""


def doctor(
    engine_url: Annotated[str | None, typer.Option("--engine-url", metavar="URL", help="The engine to ask.")] = None,
    engine: Annotated[str, typer.Option("--engine", metavar="KIND", help=ENGINE_KINDS)] = "sglang",
    json: Json = False,
    verbose: Verbose = False,
) -> None:
    """Find out whether this engine and this machine can be used, before a run does.

    Exit code 1: the engine cannot be trained with, or no sandbox that isolates works here.

    Example: polar doctor --engine-url http://127.0.0.1:30000 --engine sglang
    """
    logs.configure(verbose)
    checks = asyncio.run(_checks(engine, engine_url))
    if json:
        print_json({"ok": not _failed(checks), "checks": checks})
    else:
        out().print(_table(checks))
    raise typer.Exit(ExitCode.FAILED if _failed(checks) else ExitCode.OK)


async def _checks(kind: str, url: str | None) -> list[Check]:
    engine = engine_checks(await _probe(kind, url), url) if url else []
    return engine + _runtime_checks()


async def _probe(kind: str, url: str) -> EngineFacts:
    from polar.proxy import make_engine

    engine = await make_engine(kind, url)
    try:
        return await engine.probe()
    finally:
        await engine.close()


def engine_checks(facts: EngineFacts, url: str | None) -> list[Check]:
    """The probe's facts, each with advice; `problem` is the engine's own word and comes first."""
    subject = f"engine {facts.kind}"
    checks = [Check(subject, "answers", facts.healthy, url or "", "start it, or correct --engine-url and --engine")]
    if not facts.healthy:
        return [msgspec.structs.replace(checks[0], found=facts.problem or checks[0].found)]
    checks += [
        Check(subject, "returns token ids", facts.returns_ids, _yes(facts.returns_ids), _IDS),
        _said(subject, "model", facts.model),
        _said(subject, "tokenizer", facts.tokenizer_path, "give --tokenizer DIR to polar serve"),
        _said(subject, "context length", facts.context_length),
        _said(subject, "policy version", facts.version, "without it staleness cannot be judged"),
        _said(subject, "logprob mode", facts.logprob_mode),
    ]
    if facts.problem:
        checks.insert(1, Check(subject, "can be trained with", False, facts.problem))
    return checks


_IDS = "training needs them: use SGLang's /generate or vLLM's token endpoint, and no router that drops fields"


def _said(subject: str, what: str, value: object, advice: str = "") -> Check:
    return Check(subject, f"says its {what}", value is not None or None, "no" if value is None else str(value), advice)


def _runtime_checks() -> list[Check]:
    from polar.runtimes import RUNTIMES, unavailable

    return [_runtime(name, unavailable(name)) for name in sorted(RUNTIMES)]


def _runtime(name: str, problem: str | None) -> Check:
    found = problem or ("works; no isolation" if name == "local" else "works")
    return Check(f"runtime {name}", "starts a sandbox", problem is None, found)


def _failed(checks: list[Check]) -> bool:
    """One runtime that isolates is enough."""
    runtimes = {check.subject: check.ok for check in checks if check.subject.startswith("runtime ")}
    engine = [check.ok for check in checks if check.subject.startswith("engine ")]
    return False in engine or not any(ok for name, ok in runtimes.items() if name != "runtime local")


def _table(checks: list[Check]) -> Table:
    table = grid("", "what", "is it so", "found", "what to do")
    signs = {True: "[green]yes[/]", False: "[red]no[/]", None: "[yellow]?[/]"}
    for check in checks:
        table.add_row(check.subject, check.what, signs[check.ok], check.found, "" if check.ok else check.advice)
    return table


def _yes(value: bool) -> str:
    return "yes" if value else "no"
