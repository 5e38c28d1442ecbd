"""Case 51: a step between the rollout and the evaluator lost a field, and every reward was 0. What the engine sampled,
what the evaluator was shown, what the server keeps and what the trainer gets are the same, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.bridge.making import group

from chain import polar_serve
from peers.engine import scripted_engine
from peers.harness import scripted
from peers.tokenizer import make_tokenizer
from polar.codec import from_json, to_json
from polar.records import TaskResult
from polar.sessionlog import SessionLog, parse, unpack
from sandboxing import needs_bubblewrap
from slime_bridge.acceptance import Group, judge
from slime_bridge.fitting import ConversionRules

pytestmark = needs_bubblewrap
GIVEN = {"label": {"answer": [1, None, "x"]}}


def test_through_every_stage(tmp_path: Path) -> None:
    with (
        scripted_engine(make_tokenizer(tmp_path), numbered=True) as engine,
        polar_serve(tmp_path / "data", engine.url) as chain,
    ):
        steps = scripted(("call", "first"), ("call", "second"))
        evaluator = {"strategy": "peers.scorers:Witness"}
        results = chain.run("seen", num_samples=2, evaluator=evaluator, metadata=GIVEN, **steps)
        logs = [
            parse(unpack(chain.http.get(f"/tasks/seen/sessions/{result['session_id']}/log").content))
            for result in results
        ]
    for result, log in zip(results, logs, strict=True):
        check_evaluator(result, log)
    check_samples(results)


def check_evaluator(result: dict[str, Any], log: SessionLog) -> None:
    """What it saw is what is kept, and holds each answer as the log has it."""
    saw = result["trajectory"]["metadata"]["evaluation"]["saw"]
    assert saw["task"] == {"instruction": "do it", "metadata": GIVEN}
    assert (saw["status"], saw["termination"]) == (result["status"], result["metadata"]["termination"])
    kept = result["trajectory"]["traces"]
    assert [trace | {"reward": None} for trace in kept] == saw["traces"]
    assert [trace["reward"] for trace in kept] == [0.75]
    (trace,) = saw["traces"]
    answers = [message for message in trace["response_messages"] if message["role"] == "assistant"]
    assert answers == [call.finished.message for call in log.calls if call.finished is not None]
    sampled = [id_ for id_, mask in zip(trace["response_ids"], trace["loss_mask"], strict=True) if mask]
    assert sampled == [id_ for call in log.calls for id_ in call.ids.tolist()]


def check_samples(results: list[dict[str, Any]]) -> None:
    whole = from_json(to_json({"task_id": "seen", "status": "completed", "results": results}), TaskResult)
    accepted = judge(whole, group(2), ConversionRules(), submitted=0, min_fraction=1.0)
    assert isinstance(accepted, Group)
    for (sample,), result in zip(accepted.samples, results, strict=True):
        (trace,) = result["trajectory"]["traces"]
        assert sample.tokens == trace["prompt_ids"] + trace["response_ids"]
        assert (sample.loss_mask, sample.rollout_log_probs) == (trace["loss_mask"], trace["response_logprobs"])
        assert (sample.prompt, sample.reward) == (trace["prompt_messages"], 0.75)
        assert sample.metadata["polar"]["evaluation"]["saw"]["traces"] == [trace | {"reward": None}]
