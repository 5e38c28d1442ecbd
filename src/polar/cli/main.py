"""The `polar` script: a fault that has a name becomes a line on stderr and an exit code; nothing else is caught."""

from __future__ import annotations

import errno
import sys
from collections.abc import Collection
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup

from polar.cli.console import ExitCode, stop
from polar.errors import ConfigError, PolarError, TaskFault
from polar.garbage import collect_rarely

EPILOG = "Start with `polar demo`; or `polar serve`, then `polar run tasks.jsonl` in another terminal."


class Group(TyperGroup):
    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PolarError as fault:
            raise stop(fault.message, code_of(fault)) from fault
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            raise stop(f"cannot write: {error.strerror}", ExitCode.FAILED) from error


COMMANDS = {
    "serve": "serve",
    "run": "run",
    "submit": "tasks",
    "status": "tasks",
    "cancel": "tasks",
    "show": "show",
    "why": "why",
    "rebuild": "rebuild",
    "rescore": "rescore",
    "doctor": "doctor",
    "gateway": "gateway",
    "server": "gateway",
    "demo": "demo",
}
"""each command's module, which has a function of its name"""
_HANDS_OVER: dict[str, Any] = {
    "context_settings": {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    "add_help_option": False,
}
"""the demo reads its options itself"""


def make_app(names: Collection[str] = COMMANDS) -> typer.Typer:
    """The script with these commands."""
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
    app.callback()(lambda: None)  # without one an app of a single command would take that one's name for an argument
    for name in names:
        command = getattr(import_module(f"polar.cli.{COMMANDS[name]}"), name)
        app.command(name, **(_HANDS_OVER if name == "demo" else {}))(command)
    return app


def main() -> None:
    """Of the commands only the one that is named is imported: a start takes as long as its imports."""
    collect_rarely()
    make_app(COMMANDS.keys() & set(sys.argv[1:2]) or COMMANDS)()


def code_of(fault: PolarError) -> ExitCode:
    return ExitCode.USAGE if isinstance(fault, ConfigError | TaskFault) else ExitCode.FAILED
