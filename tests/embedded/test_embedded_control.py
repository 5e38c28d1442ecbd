"""Pausing, new weights and aborting: what changes between two steps, and which version an answer carries."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from embedded.real_engine import CONTEXT, Engine, engine_process, full_forward, save_random_policy
from polar_demo.policy import Policy
from polar_demo.vocabulary import WORDS

PROMPT = [4, 7, 57, 8, 9, 136, 10, 2, 5]
LONG = 150  # tokens; an answer that runs to its end while something else is asked
ENDLESS = CONTEXT - len(PROMPT)  # one that is aborted before it ends


def start_long(pool: ThreadPoolExecutor, engine: Engine, new: int, rid: str | None = None) -> Future[dict[str, Any]]:
    answer = pool.submit(engine.generate, PROMPT, rid=rid, seed=11, max_new_tokens=new, ignore_eos=True)
    engine.wait_for(running=1)
    return answer


def test_an_aborted_answer_is_continued_from_its_ids_under_new_weights(engine: Engine, second_weights: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = start_long(pool, engine, ENDLESS)
        engine.post("/pause_generation", {"mode": "abort"})
        part = running.result()
        assert part["meta_info"]["finish_reason"]["type"] == "abort"
        assert part["meta_info"]["weight_version"] == "1"
        sampled = part["output_ids"]
        assert 0 < len(sampled) < ENDLESS
        waiting = pool.submit(engine.generate, PROMPT + sampled, seed=11, max_new_tokens=10, ignore_eos=True)
        engine.post("/update_weights_from_disk", {"model_path": str(second_weights), "weight_version": "2"})
        assert not waiting.done()
        engine.post("/continue_generation", {})
        rest = waiting.result()
    assert rest["meta_info"]["weight_version"] == "2"
    logprobs = [logprob for logprob, _, _ in rest["meta_info"]["output_token_logprobs"]]
    expected = full_forward(Policy.load(second_weights), PROMPT + sampled, rest["output_ids"], 1.0)
    assert logprobs == pytest.approx(expected, abs=1e-5)


def test_continuing_an_abort_under_the_same_weights_samples_what_would_have_come(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = start_long(pool, engine, ENDLESS, rid="mine")
        engine.post("/abort_request", {"rid": "somebody else's"})
        assert not running.done()
        engine.post("/abort_request", {"rid": "mine"})
        part = running.result()["output_ids"]
    assert 0 < len(part) < ENDLESS
    more = min(20, ENDLESS - len(part))
    rest = engine.generate(PROMPT + part, seed=11, max_new_tokens=more, ignore_eos=True)["output_ids"]
    whole = engine.generate(PROMPT, seed=11, max_new_tokens=len(part) + more, ignore_eos=True)["output_ids"]
    assert part + rest == whole


@pytest.mark.parametrize("mode", ["in_place", "retract"])
def test_a_pause_that_keeps_requests_changes_nothing_of_their_answers(engine: Engine, mode: str) -> None:
    whole = engine.generate(PROMPT, seed=11, max_new_tokens=LONG, ignore_eos=True)["output_ids"]
    with ThreadPoolExecutor(1) as pool:
        running = start_long(pool, engine, LONG)
        engine.post("/pause_generation", {"mode": mode})
        assert engine.get("/server_info")["paused"] is True
        engine.post("/continue_generation", {})
        assert running.result()["output_ids"] == whole


def test_new_weights_without_a_pause_wait_until_nothing_runs(engine: Engine, second_weights: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        running = start_long(pool, engine, LONG)
        engine.post("/update_weights_from_disk", {"model_path": str(second_weights), "weight_version": "2"})
        before = running.result()
    after = engine.generate(PROMPT, seed=11, max_new_tokens=4, ignore_eos=True)
    assert (before["meta_info"]["weight_version"], after["meta_info"]["weight_version"]) == ("1", "2")
    assert len(before["output_ids"]) == LONG
    assert engine.get("/get_weight_version") == {"weight_version": "2"}
    assert engine.get("/get_model_info")["model_path"] == str(second_weights)


def test_a_stream_across_an_update_in_place_says_the_version_of_each_event(
    engine: Engine, second_weights: Path
) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": LONG, "ignore_eos": True, "seed": 1}, "rid": "x"}
    versions = []
    for count, event in enumerate(engine.events("/generate", body), start=1):
        versions.append(event["meta_info"]["weight_version"])
        if count == 3:
            engine.post("/pause_generation", {"mode": "in_place"})
            engine.post("/update_weights_from_disk", {"model_path": str(second_weights), "weight_version": "2"})
            engine.post("/continue_generation", {})
    assert versions == sorted(versions)
    assert set(versions) == {"1", "2"}


def test_weights_that_do_not_fit_change_nothing(engine: Engine, tmp_path: Path, first_weights: Path) -> None:
    broken = save_random_policy(tmp_path / "nan", seed=3)
    weights = torch.load(broken / "model.pt")
    weights["embedding.weight"][0, 0] = float("nan")
    torch.save(weights, broken / "model.pt")
    smaller = save_random_policy(tmp_path / "small", seed=3)
    config = smaller / "config.json"
    config.write_text(config.read_text().replace(f'"vocab_size": {len(WORDS)}', '"vocab_size": 12'))
    for folder, why in ((tmp_path / "none", "config.json"), (broken, "not finite"), (smaller, "cannot load")):
        answer = engine.http.post("/update_weights_from_disk", json={"model_path": str(folder), "weight_version": "9"})
        assert answer.status_code == 400
        assert answer.json()["success"] is False
        assert why in answer.json()["message"]
    assert engine.generate(PROMPT, max_new_tokens=1)["meta_info"]["weight_version"] == "1"


def test_a_rid_that_runs_already_is_refused(engine: Engine) -> None:
    with ThreadPoolExecutor(1) as pool:
        running = start_long(pool, engine, ENDLESS, rid="twice")
        answer = engine.http.post("/generate", json={"input_ids": PROMPT, "rid": "twice"})
        assert answer.status_code == 400
        assert "rid" in answer.text
        engine.post("/abort_request", {"abort_all": True})
        assert running.result()["meta_info"]["finish_reason"]["type"] == "abort"


@pytest.mark.parametrize(
    ("path", "body"),
    [("/pause_generation", {"mode": "soon"}), ("/abort_request", {}), ("/update_weights_from_disk", {})],
)
def test_bad_orders_are_refused(engine: Engine, path: str, body: dict[str, Any]) -> None:
    answer = engine.http.post(path, json=body)
    assert answer.status_code == 400
    assert answer.json()["param"] in ("mode", "rid", "model_path")


def test_what_the_engine_says_of_itself(engine: Engine, first_weights: Path) -> None:
    for path in ("/health", "/health_generate"):
        engine.get(path)
    for path in ("/get_server_info", "/server_info", "/get_model_info", "/model_info"):
        assert engine.get(path)["weight_version"] == "1"
        assert engine.get(path)["tokenizer_path"] == str(first_weights)
    assert engine.get("/server_info")["context_length"] == CONTEXT
    assert engine.get("/v1/models")["data"][0]["max_model_len"] == CONTEXT
    assert engine.http.post("/flush_cache").status_code == 200


def test_a_folder_that_holds_no_model_is_named_and_the_exit_code_is_not_zero(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "polar.embedded", "--model", str(tmp_path), "--port", "0"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode != 0
    assert str(tmp_path / "config.json") in ended.stderr
    assert "Traceback" not in ended.stderr


def test_told_to_end_in_the_middle_of_an_answer_it_ends(first_weights: Path) -> None:
    with ThreadPoolExecutor(1) as pool:
        with engine_process(first_weights) as engine:
            running = start_long(pool, engine, ENDLESS)
        assert running.exception() is not None
