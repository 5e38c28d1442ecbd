"""`polar doctor`: what cannot be used is named with what to do, before a run finds out."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from cli.conftest import inside
from peers.engine import scripted_engine
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


COMPLETIONS, TOKENS = "/v1/completions", "/inference/v1/generate"
HANGS = {"fault": "hang", "text": "x"}
FAULTY = {
    "ids that a router drops": ("sglang", [], {"fault": "no_ids"}, "no token ids"),
    "no logprobs": ("sglang", [], {"without": ["output_token_logprobs"]}, "`output_token_logprobs`"),
    "misaligned logprobs": ("sglang", [], {"logprobs": []}, "misaligned"),
    "no ids by chat": ("vllm", [], {"fault": "no_ids"}, "`token_ids`"),
    "no logprobs by chat": ("vllm_chat", [], {"without": ["logprobs"]}, "`logprobs`"),
    "no ids by SGLang's chat": ("sglang_chat", [], {"fault": "no_ids"}, "no token ids with chat completions"),
    "no logprobs by SGLang's chat": ("sglang_chat", [], {"without": ["logprobs"]}, "no logprobs that match"),
    "it hangs": ("sglang", [], HANGS, "loading, overloaded, or hanging"),
    "500": ("sglang", [], {"fault": "500"}, "500: "),
    "500 by chat": ("vllm", [], {"fault": "500"}, "with /v1/chat/completions?"),
    "500 of any server": ("openai", [], {"fault": "500"}, "500: "),
    "a web page": ("sglang", [], {"fault": "html"}, "not JSON: b'<html>"),
    "a web page for completions": ("openai", [], {"fault": "html"}, "not JSON: b'<html>"),
}
SOUND = "answers as it must"
LACKING = {
    "processed logprobs": ("vllm", [TOKENS], "processed", "logprobs as a trainer's", "top_p, top_k or min_p"),
    "raw logprobs of vLLM": ("vllm", [COMPLETIONS], "raw", "logprobs as a trainer's", "--logprobs-mode"),
    "raw logprobs of SGLang": (
        "sglang",
        [],
        "raw",
        "logprobs as a trainer's",
        "without SGLANG_RETURN_ORIGINAL_LOGPROB",
    ),
    "no context length": ("sglang", [], None, "says its context length", "refused by the engine"),
    "no policy version": ("vllm", [COMPLETIONS], None, "says its policy version", "--enable-scale-out"),
    "prompts of its own": ("vllm_chat", [], None, "takes token ids", "forks the trace"),
    "no ids of any server": ("openai", [], None, "returns token ids", "use SGLang or vLLM"),
    "no logprobs of any server": ("openai", [], None, "returns a logprob a token", "use SGLang or vLLM"),
    "logprobs nobody tells": ("openai", [], None, "logprobs as a trainer's", "compare some"),
    "no tokenizer": ("vllm", [TOKENS], None, "says its tokenizer", "--tokenizer DIR"),
    "a tokenizer of its own": ("vllm_chat", [], None, "says its tokenizer", "not needed"),
    "forms that it may take": ("openai", [], None, "holds to JSON schemas", "passed on"),
    "no forms": ("embedded", [], None, "holds to JSON schemas", "refused by name"),
}


@pytest.mark.parametrize("fault", FAULTY)
def test_what_is_broken_is_said_with_what_to_do(tokenizer: Path, fault: str) -> None:
    kind, offers, step, found = FAULTY[fault]
    with scripted_engine(tokenizer, offers=offers) as engine:
        engine.script(*[{"text": "x", "probe": True} | step] * 4)
        done = inside("doctor", "--engine-url", engine.url, "--engine", kind, "--json")
    check = json.loads(done.stdout)["checks"][0]
    assert (done.exit_code, check["what"], check["ok"]) == (1, SOUND, False)
    assert found in check["found"]
    assert "correct the URL" in check["advice"]


@pytest.mark.parametrize("lack", LACKING)
def test_what_is_lacking_is_said_with_what_it_costs(tokenizer: Path, lack: str) -> None:
    kind, offers, mode, what, advice = LACKING[lack]
    with scripted_engine(tokenizer, offers=offers, mode=mode or "sampling_temperature") as engine:
        if lack == "no context length":
            engine.context(None)
        done = inside("doctor", "--engine-url", engine.url, "--engine", kind, "--json")
    checks = {check["what"]: check for check in json.loads(done.stdout)["checks"] if kind in check["subject"]}
    assert checks[SOUND]["ok"]
    assert not checks[what]["ok"]
    assert advice in checks[what]["advice"]
    assert done.exit_code == (1 if kind == "openai" else 0)


@pytest.mark.parametrize("mode", [*LogprobMode, None])
def test_each_distribution_of_logprobs_has_advice(mode):
    facts = EngineFacts(kind="vllm", healthy=True, returns_ids=True, returns_logprobs=True, logprob_mode=mode)
    [check] = [check for check in engine_checks(facts, "http://x") if check.what == "logprobs as a trainer's"]
    assert check.ok is (mode is LogprobMode.SAMPLING_TEMPERATURE or None)
    assert bool(check.advice) is not check.ok
