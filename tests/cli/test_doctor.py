"""`polar doctor`: what cannot be used is named with what to do, before a run finds out."""

from __future__ import annotations

import json
import time

import pytest

from cli.conftest import inside
from polar.cli.doctor import engine_checks
from polar.protocols import EngineFacts
from polar.records import LogprobMode


def test_a_sound_engine_and_machine(engine):
    done = inside("doctor", "--engine-url", engine.url, "--json")
    checks = {(check["subject"], check["what"]): check["ok"] for check in json.loads(done.stdout)["checks"]}
    assert done.exit_code == 0, done.stdout
    assert checks["engine sglang", "returns token ids"]
    assert checks["runtime bubblewrap", "starts a sandbox"]


@pytest.mark.parametrize("without", [["meta_info"], ["output_ids", "meta_info"]])
def test_an_engine_behind_something_that_drops_fields_is_named_within_five_seconds(engine, without):
    engine.script({"ids": [7], "without": without, "probe": True})
    started = time.monotonic()
    done = inside("doctor", "--engine-url", engine.url)
    assert time.monotonic() - started < 5
    assert done.exit_code == 1
    assert "meta_info" in done.stdout


def test_no_engine_says_what_to_start():
    done = inside("doctor", "--engine-url", "http://127.0.0.1:9")
    assert done.exit_code == 1
    assert "http://127.0.0.1:9" in done.stdout


def test_a_machine_can_be_asked_without_an_engine():
    done = inside("doctor")
    assert "runtime bubblewrap" in done.stdout
    assert "no isolation" in done.stdout


def test_what_an_engine_does_not_say_is_no_failure():
    facts = EngineFacts(kind="vllm", healthy=True, returns_ids=True, returns_logprobs=True)
    checks = engine_checks(facts, "http://x")
    assert not [check for check in checks if check.ok is False]
    assert any(check.advice and check.ok is None for check in checks)


def test_a_problem_in_the_engines_own_words_comes_before_what_is_missing():
    facts = EngineFacts(kind="openai", healthy=True, problem="it returns no token ids")
    checks = engine_checks(facts, "http://x")
    assert [check.found for check in checks if check.ok is False] == ["it returns no token ids", "no", "no"]


@pytest.mark.parametrize(
    ("kind", "without", "field"),
    [("sglang", ["output_token_logprobs"], "output_token_logprobs"), ("vllm", ["token_ids"], "token_ids")],
)
def test_a_field_that_a_router_drops_is_named(engine, kind, without, field):
    engine.script({"text": "x", "without": without, "probe": True})
    started = time.monotonic()
    done = inside("doctor", "--engine-url", engine.url, "--engine", kind, "--json")
    assert time.monotonic() - started < 5
    document = json.loads(done.stdout)
    assert not document["ok"]
    assert f"`{field}`" in document["checks"][0]["found"]


@pytest.mark.parametrize("mode", [*LogprobMode, None])
def test_each_distribution_of_logprobs_has_advice(mode):
    facts = EngineFacts(kind="vllm", healthy=True, returns_ids=True, returns_logprobs=True, logprob_mode=mode)
    [check] = [check for check in engine_checks(facts, "http://x") if check.what == "logprobs as a trainer's"]
    assert check.ok is (mode is LogprobMode.SAMPLING_TEMPERATURE or None)
    assert bool(check.advice) is not check.ok
