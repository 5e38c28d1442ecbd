"""What the demo shows: a line a step, a curve (terminal and PNG), the proofs, and one JSON line at the end."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib
from rich.console import Console
from rich.table import Table

from polar_demo.trainer import Truth

matplotlib.use("Agg")
from matplotlib import pyplot

LOGPROB_GATE, RATIO_GATE = 1e-4, 2e-4
_FIRST, _LAST = 3, 5
_ROWS = 8


@dataclass
class Report:
    """Collects every step; `broken` says which proof does not hold."""

    run_dir: Path
    console: Console
    rewards: list[float] = field(default_factory=list)
    sampled: int = 0
    trainable: int = 0
    excluded: int = 0
    logprob_max_abs_diff: float = 0.0
    ratio_max_abs_gap: float = 0.0
    ledger_balanced: bool = True
    completions: int = 0
    continued: int = 0
    traces: list[float] = field(default_factory=list)

    def step(self, number: int, metrics: dict[str, float], truth: Truth, seconds: float) -> None:
        self.rewards.append(metrics["polar/reward_mean"])
        self.sampled += int(metrics.get("polar/tokens/sampled", 0))
        self.trainable += int(metrics.get("polar/tokens/trainable", 0))
        self.excluded += int(metrics["polar/tokens/excluded"])
        self.completions += int(metrics.get("polar/calls/completions", 0))
        self.continued += int(metrics.get("polar/calls/continued", 0))
        self.traces.append(metrics["polar/samples_per_trajectory"])
        self.logprob_max_abs_diff = max(self.logprob_max_abs_diff, truth.logprob_max_abs_diff)
        self.ratio_max_abs_gap = max(self.ratio_max_abs_gap, truth.ratio_max_abs_gap)
        self.ledger_balanced = self.ledger_balanced and bool(metrics["polar/ledger/balanced"])
        self._line(number, metrics, truth, seconds)
        with (self.run_dir / "steps.jsonl").open("a") as file:
            file.write(json.dumps({"step": number, "seconds": round(seconds, 3)} | metrics) + "\n")

    def _line(self, number: int, metrics: dict[str, float], truth: Truth, seconds: float) -> None:
        reward = self.rewards[-1]
        self.console.print(
            f"step {number:>3}  reward {reward:.2f} {'█' * round(reward * 20):<20}  {seconds:4.1f} s  "
            f"{truth.tokens:>4} tokens trained, {self.traces[-1]:.2f} traces a session, "
            f"logprobs off by {truth.logprob_max_abs_diff:.0e}, dropped: {_dropped(metrics)}",
            soft_wrap=True,
        )

    def broken(self) -> list[str]:
        wrong = []
        if self.sampled != self.trainable + self.excluded:
            wrong.append(f"sampled {self.sampled} is not trainable {self.trainable} + excluded {self.excluded}")
        if not self.sampled:
            wrong.append("nothing was sampled")
        if not self.logprob_max_abs_diff <= LOGPROB_GATE:
            wrong.append(f"recomputed logprobs are off by {self.logprob_max_abs_diff:.2e}, more than {LOGPROB_GATE}")
        if not self.ratio_max_abs_gap <= RATIO_GATE:
            wrong.append(f"|ratio - 1| is {self.ratio_max_abs_gap:.2e} at a first update, more than {RATIO_GATE}")
        if not self.ledger_balanced:
            wrong.append("the bridge's ledger does not balance")
        return wrong

    def finish(self, seconds: float) -> None:
        """Curve, proofs, and the JSON line, which is the last of the output."""
        self._picture()
        for row in curve(self.rewards):
            self.console.print(row, markup=False, highlight=False)
        self.console.print(self._proofs())
        print(json.dumps(self.summary(seconds)), flush=True)

    def summary(self, seconds: float) -> dict[str, Any]:
        return {
            "reward_first": round(_mean(self.rewards[:_FIRST]), 4),
            "reward_last": round(_mean(self.rewards[-_LAST:]), 4),
            "steps": len(self.rewards),
            "seconds": round(seconds, 1),
            "sampled": self.sampled,
            "trainable": self.trainable,
            "excluded": self.excluded,
            "logprob_max_abs_diff": self.logprob_max_abs_diff,
            "run_dir": str(self.run_dir),
        }

    def _proofs(self) -> Table:
        table = Table(title="Is it true?", show_header=False)
        share = self.continued / self.completions if self.completions else 0.0
        rows = {
            "sampled = trainable + excluded": f"{self.sampled} = {self.trainable} + {self.excluded}",
            "recomputed logprobs differ by at most": f"{self.logprob_max_abs_diff:.1e}  (gate {LOGPROB_GATE:.0e})",
            "|ratio − 1| before a first update, at most": f"{self.ratio_max_abs_gap:.1e}  (gate {RATIO_GATE:.0e})",
            "the bridge's ledger": "balances" if self.ledger_balanced else "does not balance",
            "traces a session": f"{_mean(self.traces):.2f}",
            "calls that continued from sampled ids": f"{share:.0%} of {self.completions}",
        }
        for name, value in rows.items():
            table.add_row(name, value)
        return table

    def _picture(self) -> None:
        figure, axes = pyplot.subplots(figsize=(7, 4))
        axes.plot(range(1, len(self.rewards) + 1), self.rewards, marker="o", markersize=3)
        axes.set(xlabel="step", ylabel="mean reward", ylim=(0, 1), title="Polar demo")
        axes.grid(alpha=0.3)
        figure.savefig(self.run_dir / "reward.png", dpi=120, bbox_inches="tight")
        pyplot.close(figure)


def curve(rewards: list[float]) -> list[str]:
    """Rewards between 0 and 1 as rows of text, two columns a step."""
    rows = []
    for row in range(_ROWS, 0, -1):
        low = (row - 1) / _ROWS
        cells = "".join("██" if value > low + 0.5 / _ROWS else "▄▄" if value > low else "  " for value in rewards)
        rows.append(f"{row / _ROWS:4.2f} │{cells}")
    return [*rows, "     └" + "──" * len(rewards) + " step"]


def _dropped(metrics: dict[str, float]) -> str:
    """Only the reasons that occurred."""
    prefix, suffix = "polar/dropped_", "_groups"
    reasons = {
        name.removeprefix(prefix).removesuffix(suffix): int(count)
        for name, count in metrics.items()
        if name.startswith(prefix) and name.endswith(suffix) and count and name != "polar/dropped_groups"
    }
    return ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "none"


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
