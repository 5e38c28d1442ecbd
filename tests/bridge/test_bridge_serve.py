"""The whole way: the hooks, a real `polar serve`, real sandboxes with a harness that calls its model; only the engine
is scripted. Its address is Slime's router, so that the bridge asks it for the policy version."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.bridge.making import arguments
from tests.chain import Chain, polar_serve, until
from tests.peers import harness
from tests.peers.engine import ScriptedEngine, scripted_engine
from tests.peers.tokenizer import make_tokenizer
from tests.peers.trainer import Trainer

from polar.config import TOKEN_HEADER
from slime_bridge import rollout

Make = Callable[..., Trainer]
RIGHT = {
    "strategy": "command",
    "config": {"command": 'test "$RIGHT" = "{sample.label}"'},
    "env": {"RIGHT": "label of p0"},
}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_engine(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))) as running:
        yield running


@pytest.fixture(scope="module")
def chain(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with polar_serve(tmp_path_factory.mktemp("serve") / "data", engine.url, "--engine", "sglang") as running:
        yield running


@pytest.fixture
def make_trainer(chain: Chain, engine: ScriptedEngine, tmp_path: Path) -> Iterator[Make]:
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"input": f"p{number}", "label": f"label of p{number}"} for number in range(20)]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    router, port = engine.url.removeprefix("http://").split(":")

    def make(*steps: tuple[str, Any], **changed: Any) -> Trainer:
        settings = {
            "polar_rollout_url": chain.url,
            "polar_task_template": task(*(steps or (("call", "begin"),))),
            "prompt_data": str(prompts),
            "label_key": "label",
            "sglang_router_ip": router,
            "sglang_router_port": int(port),
            "save": None,
            "load": None,
        }
        return Trainer(arguments(**(settings | changed)))

    yield make
    rollout.close()


def task(*steps: tuple[str, Any]) -> dict[str, Any]:
    """The harness's program is uploaded as a file: its braces are its own, not the template's."""
    template = harness.scripted(*steps)
    template["runtime"]["prepare"][0] = {
        "type": "upload_file",
        "source": harness.__file__,
        "target": "/session/harness.py",
    }
    return template | {"evaluator": RIGHT, "timeout_seconds": 60.0}


def test_slimes_sampling_reaches_the_engine_and_the_evaluator_sees_the_label(
    chain: Chain, engine: ScriptedEngine, make_trainer: Make
):
    before = len(engine.requests)
    trainer = make_trainer(
        rollout_temperature=0.7,
        rollout_top_k=5,
        rollout_max_response_len=11,
        rollout_stop=["END"],
        rollout_stop_token_ids=[9, 8],
    )
    step = trainer.rollout(0)
    assert step.groups == [0, 1]
    assert step.raw == [1.0, 1.0, 0.0, 0.0]
    calls = [request["sampling_params"] for request in engine.requests[before:] if len(request["input_ids"]) > 1]
    assert len(calls) == 4
    for sampling in calls:
        told = {name: sampling[name] for name in ("temperature", "top_p", "top_k", "max_new_tokens", "stop")}
        assert told == {"temperature": 0.7, "top_p": 1.0, "top_k": 5, "max_new_tokens": 11, "stop": ["END"]}
        assert set(sampling["stop_token_ids"]) >= {9, 8}
    sample = step.samples[0]
    names = [name for name in chain.http.get("/rollout/status").json()["tasks"] if name.startswith("polar-slime-0-0-")]
    asked = chain.http.get(f"/tasks/{names[0]}/request").json()
    assert asked["metadata"]["policy_version"] == sample.weight_versions[0]
    assert sample.rollout_log_probs == [-0.5] * sample.response_length


def test_age_is_counted_from_the_entry_at_which_the_tokens_policy_was_first_the_engines(
    chain: Chain, engine: ScriptedEngine, make_trainer: Make
):
    """With groups ahead: those of rollout 4 were sampled before the weights changed."""
    trainer = make_trainer(polar_prefetch=True)
    first = trainer.rollout(3)
    until(lambda: running(chain) == [], 60)
    engine.version("2")
    second = trainer.rollout(4)
    until(lambda: running(chain) == [], 60)
    third = trainer.rollout(5)
    ages = [(step.metrics["polar/staleness/mean"], step.metrics["polar/staleness/max"]) for step in (first, second)]
    assert ages == [(0.0, 0.0), (1.0, 1.0)]
    assert (versions(first), versions(second)) == ({"1"}, {"1"})
    assert third.metrics["polar/staleness/max"] == (2 if "1" in versions(third) else 1)
    assert third.metrics["polar/staleness/unknown_versions"] == 0


def running(chain: Chain) -> list[str]:
    tasks = chain.http.get("/tasks", params={"limit": 1000}).json()["tasks"]
    return [task["task_id"] for task in tasks if task["status"] in ("running", "cancelling")]


def versions(step: Any) -> set[str]:
    return {version for sample in step.samples for version in sample.weight_versions}


def test_colocated_engines_are_idle_between_calls(
    chain: Chain, engine: ScriptedEngine, make_trainer: Make, tmp_path: Path
):
    """Also when a straggler was given up in the middle of its call, and after an evaluation."""
    held_out = tmp_path / "eval.jsonl"
    held_out.write_text('{"input": "e0", "label": "label of p0"}\n')
    trainer = make_trainer(
        colocate=True,
        polar_weight_update_pause_timeout=60.0,
        polar_straggler_deadline=4.0,
        eval_prompt_data=["held_out", str(held_out)],
    )
    assert len(trainer.rollout(0).groups) == 2
    assert_idle(chain)
    engine.script({"text": "slow", "hold": True})
    assert trainer.rollout(1).metrics["polar/replaced_stragglers"] >= 1
    assert_idle(chain)
    assert trainer.evaluate(1).data["held_out"]["rewards"] == [1.0]
    assert_idle(chain)
    chain.http.post("/rollout/inference/resume").raise_for_status()


def test_the_pause_of_colocated_engines_lasts_as_long_as_the_trainer_trains(chain: Chain, make_trainer: Make):
    """A step may take longer than any pause is asked for; a trainer that has ended holds nobody up."""
    trainer = make_trainer(colocate=True, polar_weight_update_pause_timeout=3.0)
    trainer.rollout(0)
    time.sleep(4.5)
    assert_idle(chain)
    rollout.close()
    until(lambda: not chain.http.get("/rollout/inference/status").json()["paused"], 30)


def assert_idle(chain: Chain) -> None:
    told = chain.http.get("/rollout/inference/status").json()
    assert (told["paused"], told["mode"], told["waiting_for"]) == (True, "abort", [])
    assert running(chain) == []
    token = {TOKEN_HEADER: (chain.data / "control_token").read_text().strip()}
    gateway = httpx.get(chain.gateway_url + "/admin/inference/status", headers=token, trust_env=False).json()
    assert (gateway["paused"], gateway["inflight"]) == (True, 0)
    wrong = {TOKEN_HEADER.encode(): b"\xff"}
    assert httpx.get(chain.gateway_url + "/admin/inference/status", headers=wrong, trust_env=False).status_code == 401


@pytest.mark.slow
def test_a_server_that_is_killed_in_the_middle_of_a_rollout_costs_it_nothing(
    engine: ScriptedEngine, make_trainer: Make, tmp_path: Path
):
    """Server, gateway and sandboxes are gone at once; what comes back has the same address and the same data."""
    steps: list[Any] = []
    engine.script(*[{"text": "slow", "hold": True}] * 2)
    before = len(engine.requests)
    with polar_serve(tmp_path / "data", engine.url, "--engine", "sglang") as first:
        trainer = make_trainer(polar_rollout_url=first.url)
        rolling = threading.Thread(target=lambda: steps.append(trainer.rollout(0)))
        rolling.start()
        until(lambda: len([each for each in engine.requests[before:] if len(each["input_ids"]) > 1]) >= 2, 60)
        first.process.kill()
        first.process.wait(30)
    engine.release()
    with polar_serve(tmp_path / "data", engine.url, "--engine", "sglang", "--port", first.url.rsplit(":", 1)[1]):
        rolling.join(180)
        (step,) = steps
        rollout.close()
    assert step.groups == [0, 1]
    assert step.metrics["polar/rollout_success_rate"] == 1.0
    assert step.metrics["polar/ledger/balanced"] == 1
