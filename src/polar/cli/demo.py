"""`polar demo`: hands over to the demo's own process, options and all."""

from __future__ import annotations

import importlib.util
import os
import sys

import typer

from polar.cli.console import ExitCode, stop


def demo(context: typer.Context) -> None:
    """Watch a small policy learn a task in a sandbox, in a few minutes on a CPU. `polar demo --help`: its options.

    Example: polar demo --seed 1
    """
    if importlib.util.find_spec("torch") is None:
        raise stop("the demo needs torch: pip install 'polar-rl[demo]'", ExitCode.FAILED)
    os.execv(sys.executable, [sys.executable, "-m", "polar_demo", *context.args])
