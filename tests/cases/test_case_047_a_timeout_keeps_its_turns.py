"""Case 47: a time-out returned an empty trace though 40 turns existed."""

from __future__ import annotations

from pathlib import Path

from chain import polar_serve
from peers.engine import scripted_engine
from peers.harness import scripted
from peers.tokenizer import make_tokenizer


def test_forty_turns_are_exported_when_the_budget_ends_in_turn_41(tmp_path: Path) -> None:
    with (
        scripted_engine(make_tokenizer(tmp_path)) as engine,
        polar_serve(tmp_path / "data", engine.url) as chain,
    ):
        engine.script(*[{"ids": [70 + turn, 71, 72]} for turn in range(40)], {"text": "never heard", "hold": True})
        steps = scripted(*[("call", f"turn {turn}") for turn in range(41)])
        (result,) = chain.run("case47", timeout_seconds=15, **steps)
        engine.release()
    assert (result["status"], result["metadata"]["termination"]) == ("TIMEOUT", "agent_timeout")
    (trace,) = result["trajectory"]["traces"]
    assert sum(trace["loss_mask"]) == 40 * 3
    tokens = result["trajectory"]["metadata"]["tokens"]
    assert tokens["trainable"] == 120
    assert tokens["sampled"] == tokens["trainable"] + sum(tokens["excluded"].values())
    assert result["trajectory"]["metadata"]["calls"]["continued"] == 39
