"""The `polar` script: a fault that has a name becomes a line on stderr and an exit code; nothing else is caught."""

from __future__ import annotations

import sys

import typer

from polar.cli import demo
from polar.cli.console import ExitCode, stop
from polar.cli.doctor import doctor
from polar.cli.gateway import gateway, server
from polar.cli.serve import serve
from polar.errors import ConfigError, PolarError, TaskFault

EPILOG = "Start with `polar demo`; or `polar serve`, then `polar run tasks.jsonl` in another terminal."

app = typer.Typer(
    name="polar",
    help="Run agent harnesses, unmodified, as reinforcement-learning rollouts.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
app.command()(serve)
app.command()(doctor)
app.command(context_settings=demo.SETTINGS, add_help_option=False)(demo.demo)
app.command()(gateway)
app.command()(server)


def main() -> None:
    try:
        app()
    except PolarError as fault:
        sys.exit(stop(fault.message, code_of(fault)).exit_code)


def code_of(fault: PolarError) -> ExitCode:
    return ExitCode.USAGE if isinstance(fault, ConfigError | TaskFault) else ExitCode.FAILED
