"""The `polar` script: a fault that has a name becomes a line on stderr and an exit code; nothing else is caught."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import typer
from typer.core import TyperGroup

from polar.cli import demo
from polar.cli.console import ExitCode, stop
from polar.cli.doctor import doctor
from polar.cli.gateway import gateway, server
from polar.cli.rebuild import rebuild
from polar.cli.rescore import rescore
from polar.cli.run import run
from polar.cli.serve import serve
from polar.cli.show import show
from polar.cli.tasks import cancel, status, submit
from polar.cli.why import why
from polar.errors import ConfigError, PolarError, TaskFault

EPILOG = "Start with `polar demo`; or `polar serve`, then `polar run tasks.jsonl` in another terminal."


class Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolarError as fault:
            raise stop(fault.message, code_of(fault)) from fault


app = typer.Typer(
    name="polar",
    cls=Group,
    help="Run agent harnesses, unmodified, as reinforcement-learning rollouts.",
    epilog=EPILOG,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
)
COMMANDS: dict[str, Callable[..., None]] = {
    "serve": serve,
    "run": run,
    "submit": submit,
    "status": status,
    "cancel": cancel,
    "show": show,
    "why": why,
    "rebuild": rebuild,
    "rescore": rescore,
    "doctor": doctor,
    "gateway": gateway,
    "server": server,
}
for name, command in COMMANDS.items():
    app.command(name)(command)
app.command("demo", context_settings=demo.SETTINGS, add_help_option=False)(demo.demo)


def main() -> None:
    app()


def code_of(fault: PolarError) -> ExitCode:
    return ExitCode.USAGE if isinstance(fault, ConfigError | TaskFault) else ExitCode.FAILED
