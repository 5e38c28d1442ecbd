"""`polar demo`: a small policy learns to look things up, with an agent in a sandbox and every part of Polar between."""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Annotated, Literal

import torch
import typer
from rich.console import Console

from polar_demo.processes import Served, polar_serve, update_weights
from polar_demo.report import Report
from polar_demo.rollouts import Rollouts, mini_swe_agent_template, shell_template, slime_args, write_prompts
from polar_demo.trainer import Settings, Trainer
from polar_demo.warm_start import save, warm_start

WORKERS = 8
"""sessions at once on two cores: more only makes them wait for each other"""


def demo(
    steps: Annotated[int | None, typer.Option(min=1, help="Rollouts to train on. [20; 2 with mini_swe_agent]")] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompt groups a step.")] = 8,
    samples: Annotated[int, typer.Option(min=2, help="Sessions a group.")] = 8,
    seed: Annotated[int, typer.Option(help="Of tasks, weights and shuffling.")] = 0,
    harness: Annotated[Literal["shell", "mini_swe_agent"], typer.Option(help="The agent that runs.")] = "shell",
    run_dir: Annotated[Path | None, typer.Option(help="Folder of this run. [runs/demo-<time>]")] = None,
) -> None:
    """Watch a small policy learn a task in a sandbox, in a few minutes on a CPU.

    The agent is asked for a value that stands in one of thirty files: it has to open the right one, then copy the
    right word. The last line of output is one JSON object; exit code 1 says that a proof did not hold.
    """
    console = Console(highlight=False)
    started = time.monotonic()
    folder = _run_folder(run_dir)
    template = shell_template() if harness == "shell" else mini_swe_agent_template(_mini())
    console.print(f"run folder {folder}; a short supervised phase first …")
    torch.set_num_threads(1)  # the engine and the sandboxes want the cores
    policy = warm_start(seed)
    save(policy, folder / "policy")
    write_prompts(folder / "prompts.jsonl", seed)
    with polar_serve(folder / "policy", folder, workers=WORKERS) as served:
        args = slime_args(
            served.url,
            served.engine_url,
            folder / "prompts.jsonl",
            template,
            groups=prompts if harness == "shell" else 2,
            samples=samples if harness == "shell" else 2,
            max_tokens=32,
        )
        trainer = Trainer(policy, Settings(), seed=seed)
        report = Report(folder, console)
        _train(Rollouts(args), trainer, report, served, steps or (20 if harness == "shell" else 2))
    console.print(f"look closer: polar status --data {folder / 'data'}, then polar show and polar why", soft_wrap=True)
    report.finish(time.monotonic() - started)
    for wrong in report.broken():
        print(f"polar demo: not true: {wrong}", file=sys.stderr)
    if report.broken():
        raise typer.Exit(1)


def _train(rollouts: Rollouts, trainer: Trainer, report: Report, served: Served, steps: int) -> None:
    """Slime's loop: weights to the engine, rollout, step. One update happens before the first rollout."""
    weights = report.run_dir / "weights"
    for step in range(steps):
        started = time.monotonic()
        save(trainer.policy, weights / str(step + 1))
        update_weights(served.engine_url, weights / str(step + 1), step + 1)
        shutil.rmtree(weights / str(step - 1), ignore_errors=True)
        data, metrics = rollouts.take(step)
        truth = trainer.truth(data)
        trainer.step(data)
        report.step(step + 1, metrics, truth, time.monotonic() - started)
    save(trainer.policy, report.run_dir / "trained")
    shutil.rmtree(weights)


def _run_folder(asked: Path | None) -> Path:
    folder = (asked or Path("runs") / time.strftime("demo-%Y%m%d-%H%M%S")).resolve()
    if folder.exists() and any(folder.iterdir()):
        raise typer.BadParameter(f"{folder} is not empty: give another --run-dir")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _mini() -> Path:
    beside = Path(sys.executable).with_name("mini")
    found = str(beside) if beside.exists() else shutil.which("mini")
    if found is None:
        raise typer.BadParameter("mini-swe-agent is not installed: pip install 'polar-rl[mini]'")
    return Path(found)


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(demo)
    app(prog_name="polar demo")
