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
from polar.records import LogprobMode


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
    if not facts.healthy:
        return [Check(subject, "answers as it must", False, facts.problem or url or "", _UNHEALTHY)]
    checks = [Check(subject, "answers as it must", True, url or "")]
    if facts.problem:
        checks.append(Check(subject, "can be trained with", False, facts.problem))
    by_ids = facts.route is not None and not facts.route.endswith("/chat/completions")
    checks += [
        Check(subject, "takes token ids", by_ids or None, f"{facts.route} is used", _BY_CHAT),
        Check(subject, "returns token ids", facts.returns_ids, _yes(facts.returns_ids), _IDS),
        Check(subject, "returns a logprob a token", facts.returns_logprobs, _yes(facts.returns_logprobs), _IDS),
        _mode(subject, facts.logprob_mode),
        _said(subject, "model", facts.model),
        _said(subject, "tokenizer", facts.tokenizer_path, _TOKENIZER if by_ids else _NO_TOKENIZER),
        _said(subject, "context length", facts.context_length, "prompts that do not fit are refused by the engine"),
        _said(subject, "policy version", facts.version, _VERSION),
        Check(subject, "holds to JSON schemas", facts.grammars or None, _told(facts.grammars), _forms(facts.grammars)),
    ]
    return checks


_UNHEALTHY = (
    "gateways lease nothing until it does, and ask every 15 s: see the engine's own log, or correct the URL or kind"
)
_IDS = "training needs them: use SGLang or vLLM, and no router that drops fields; to evaluate and collect it will do"
_BY_CHAT = "it renders prompts itself: a history that it renders otherwise forks the trace, and aborted calls are lost"
_VERSION = "without it staleness cannot be judged; vLLM tells it with --enable-scale-out"
_TOKENIZER, _NO_TOKENIZER = "give --tokenizer DIR to polar serve", "not needed, as the engine renders prompts itself"
_GRAMMARS = "schemas and forced tool calls are {}; they would not be trained on anyway"
_MODES = {
    LogprobMode.SAMPLING_TEMPERATURE: "",
    LogprobMode.PROCESSED: "calls with top_p, top_k or min_p have no usable logprobs: leave them out",
    LogprobMode.RAW: "only calls at temperature 1 have usable logprobs: start vLLM with --logprobs-mode "
    "processed_logprobs, SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB",
}


def _forms(grammars: bool | None) -> str:
    return _GRAMMARS.format("passed on, whatever it makes of them" if grammars is None else "refused by name")


def _mode(subject: str, mode: LogprobMode | None) -> Check:
    """Whether a trainer can compute the same logprobs: at the sampling temperature, over the whole vocabulary."""
    ok = mode is LogprobMode.SAMPLING_TEMPERATURE or None
    advice = "compare some with your trainer's own" if mode is None else _MODES[mode]
    return Check(subject, "logprobs as a trainer's", ok, mode.value if mode else "not known", advice)


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


def _told(value: bool | None) -> str:
    return "not told" if value is None else _yes(value)
