"""What `/generate` answers, held against full forward passes over the same weights."""

from __future__ import annotations

import random
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from embedded.real_engine import CONTEXT, Engine, engine_process, full_forward
from polar_demo.vocabulary import END, WORDS

EOS = WORDS.index(END)
PROMPT = [4, 7, 57, 8, 9, 136, 10, 2, 5]

STREAMED = {
    "input_ids": PROMPT,
    "sampling_params": {"seed": 5, "max_new_tokens": 9},
    "return_logprob": True,
    "rid": "s",
}


def prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(len(WORDS)) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@pytest.mark.parametrize("longest", [3, 50, 300])
def test_logprobs_of_a_mixed_batch_are_those_of_a_full_forward_pass(engine: Engine, longest: int) -> None:
    temperatures = [0.0, 0.5, 1.0, 1.7]
    asked = [(ids, temperatures[i % 4], 5 + i * 4) for i, ids in enumerate(prompts(16, longest))]

    def ask(args: tuple[list[int], float, int]) -> dict[str, Any]:
        ids, temperature, new = args
        return engine.generate(ids, temperature=temperature, max_new_tokens=new, ignore_eos=True)

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(ask, asked))
    for (ids, temperature, new), answer in zip(asked, answers, strict=True):
        output, meta = answer["output_ids"], answer["meta_info"]
        logprobs = [logprob for logprob, _, _ in meta["output_token_logprobs"]]
        assert len(output) == new == meta["completion_tokens"]
        assert [token for _, token, _ in meta["output_token_logprobs"]] == output
        assert logprobs == pytest.approx(full_forward(engine.policy, ids, output, temperature), abs=1e-5)
        assert (meta["prompt_tokens"], meta["weight_version"]) == (len(ids), "1")
        assert meta["finish_reason"] == {"type": "length", "length": new}


def test_top_p_and_top_k_cut_the_choice_and_leave_the_logprob_as_the_trainer_recomputes_it(engine: Engine) -> None:
    greedy = engine.generate(PROMPT, temperature=0, max_new_tokens=12, ignore_eos=True)["output_ids"]
    for cut in ({"top_k": 1}, {"top_p": 1e-6}):
        answer = engine.generate(PROMPT, temperature=0.7, max_new_tokens=12, ignore_eos=True, **cut)
        assert answer["output_ids"] == greedy
        logprobs = [logprob for logprob, _, _ in answer["meta_info"]["output_token_logprobs"]]
        assert logprobs == pytest.approx(full_forward(engine.policy, PROMPT, greedy, 0.7), abs=1e-5)


def test_a_seed_repeats_its_sample_whoever_shares_the_batch(engine: Engine) -> None:
    alone = engine.generate(PROMPT, sampling_seed=7, max_new_tokens=40, ignore_eos=True)["output_ids"]
    with ThreadPoolExecutor(16) as pool:
        neighbours = [pool.submit(engine.generate, ids, max_new_tokens=60, ignore_eos=True) for ids in prompts(12, 90)]
        crowded = pool.submit(engine.generate, PROMPT, seed=7, max_new_tokens=40, ignore_eos=True).result()
        assert all(neighbour.result()["output_ids"] for neighbour in neighbours)
    other = engine.generate(PROMPT, seed=8, max_new_tokens=40, ignore_eos=True)["output_ids"]
    assert crowded["output_ids"] == alone != other


def test_samples_follow_the_probabilities(engine: Engine) -> None:
    with ThreadPoolExecutor(32) as pool:
        ask = lambda seed: engine.generate(PROMPT, seed=seed, max_new_tokens=1, temperature=0.5)  # noqa: E731
        answers = list(pool.map(ask, range(400)))
    likeliest = engine.generate(PROMPT, temperature=0, max_new_tokens=1)["output_ids"]
    expected = 2.718281828 ** full_forward(engine.policy, PROMPT, likeliest, 0.5)[0]
    assert sum(a["output_ids"] == likeliest for a in answers) / 400 == pytest.approx(expected, abs=0.1)


def test_stop_ids_stop_strings_and_the_end_of_turn(engine: Engine) -> None:
    free = engine.generate(PROMPT, seed=3, max_new_tokens=30, ignore_eos=True, skip_special_tokens=False)
    ids, words = free["output_ids"], free["text"].split()
    assert words == [WORDS[token] for token in ids]
    by_id = engine.generate(PROMPT, seed=3, max_new_tokens=30, ignore_eos=True, stop_token_ids=[ids[4]])
    cut = ids[: ids.index(ids[4]) + 1]
    assert (by_id["output_ids"], by_id["meta_info"]["finish_reason"]) == (cut, {"type": "stop", "matched": ids[4]})
    assert ids[4] not in [WORDS.index(word) for word in by_id["text"].split()]
    named = {"stop": words[5], "skip_special_tokens": False, "seed": 3, "max_new_tokens": 30, "ignore_eos": True}
    by_text = engine.generate(PROMPT, **named)
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": words[5]}
    assert words[5] not in by_text["text"]
    assert words[5] in engine.generate(PROMPT, **named, no_stop_trim=True)["text"]
    ended = next(a for s in range(500) if (a := engine.generate(PROMPT, seed=s))["output_ids"][-1] == EOS)
    assert ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": EOS}
    longer = engine.generate(PROMPT, min_new_tokens=len(ended["output_ids"]) + 1, seed=1, stop_token_ids=[EOS])
    assert len(longer["output_ids"]) > len(ended["output_ids"])


def test_streamed_events_say_everything_so_far(engine: Engine) -> None:
    whole = engine.post("/generate", STREAMED)
    events = list(engine.events("/generate", STREAMED))
    assert events[-1] == whole
    for count, event in enumerate(events, start=1):
        assert event["output_ids"] == whole["output_ids"][:count]
        assert len(event["meta_info"]["output_token_logprobs"]) == count == event["meta_info"]["completion_tokens"]
        assert whole["text"].startswith(event["text"])
        assert (event["meta_info"]["finish_reason"] is None) == (count < len(events))


def test_incremental_streams_are_disjoint(first_weights: Path) -> None:
    with engine_process(first_weights, "--incremental-streaming-output") as engine:
        whole = engine.post("/generate", STREAMED)
        events = list(engine.events("/generate", STREAMED))
    assert [token for event in events for token in event["output_ids"]] == whole["output_ids"]
    assert "".join(event["text"] for event in events) == whole["text"]
    logprobs = [entry for event in events for entry in event["meta_info"]["output_token_logprobs"]]
    assert logprobs == whole["meta_info"]["output_token_logprobs"]


BAD_BODIES: list[tuple[str, dict[str, Any]]] = [
    ("input_ids", {}),
    ("input_ids", {"input_ids": []}),
    ("input_ids", {"input_ids": [1, len(WORDS)]}),
    ("input_ids", {"input_ids": [-1]}),
    ("input_ids", {"input_ids": ["read"]}),
    ("sampling_params.temperature", {"sampling_params": {"temperature": -0.1}}),
    ("sampling_params.temperature", {"sampling_params": {"temperature": "hot"}}),
    ("sampling_params.top_p", {"sampling_params": {"top_p": 0}}),
    ("sampling_params.top_k", {"sampling_params": {"top_k": 0}}),
    ("sampling_params.max_new_tokens", {"sampling_params": {"max_new_tokens": 0}}),
    ("sampling_params.n", {"sampling_params": {"n": 2}}),
    ("sampling_params.min_p", {"sampling_params": {"min_p": 0.1}}),
    ("sampling_params.repetition_penalty", {"sampling_params": {"repetition_penalty": 1.1}}),
    ("sampling_params.logit_bias", {"sampling_params": {"logit_bias": {"3": 5}}}),
    ("sampling_params.json_schema", {"sampling_params": {"json_schema": "{}"}}),
    ("sampling_params.stop_token_ids", {"sampling_params": {"stop_token_ids": [9999]}}),
    ("max_new_tokens", {"sampling_params": {"max_new_tokens": CONTEXT}}),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("field", "body"), BAD_BODIES)
def test_bad_input_is_refused_by_name(engine: Engine, field: str, body: dict[str, Any], stream: bool) -> None:
    given = body if field == "input_ids" else {"input_ids": PROMPT} | body
    answer = engine.http.post("/generate", json=given | {"stream": stream})
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith(f"{field}"), answer.text


def test_a_prompt_that_is_too_long_is_told_how_long_and_the_limit(engine: Engine) -> None:
    answer = engine.http.post("/generate", json={"input_ids": [7] * (CONTEXT + 1)})
    assert answer.status_code == 400
    said = answer.json()["error"]["message"]
    assert f"({CONTEXT + 1} tokens) is longer than the model's context length ({CONTEXT} tokens)" in said


def test_a_body_that_is_not_json_is_refused(engine: Engine) -> None:
    assert engine.http.post("/generate", content=b"{").status_code == 400


def test_a_client_that_leaves_frees_its_place(engine: Engine) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": CONTEXT - 20, "ignore_eos": True}}
    # Paused, nothing can end by itself.
    for stream in (False, True):
        with socket.create_connection((engine.http.base_url.host, engine.http.base_url.port or 0)) as client:
            request = httpx.Request("POST", engine.http.base_url.join("/generate"), json=body | {"stream": stream})
            head = "".join(f"{key}: {value}\r\n" for key, value in request.headers.items())
            client.sendall(f"POST /generate HTTP/1.1\r\n{head}\r\n".encode() + request.content)
            engine.wait_for(running=1)
            engine.post("/pause_generation", {"mode": "in_place"})
        engine.wait_for(running=0)
        engine.post("/continue_generation", {})
