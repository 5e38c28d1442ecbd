"""Chat completions sample what `/generate` samples, with the ids in vLLM's places."""

from __future__ import annotations

from typing import Any

import pytest

from embedded.real_engine import CONTEXT, Engine
from polar_demo.vocabulary import WORDS, render, tokenizer

MESSAGES = [
    {"role": "system", "content": "answer what is in the file"},
    {
        "role": "user",
        "content": [{"type": "text", "text": "in kapok.ini what"}, {"type": "text", "text": "is proxy ?"}],
    },
    {"role": "assistant", "content": "read kapok.ini"},
    {"role": "tool", "content": "proxy = amber ;\n"},
]
ASKED = {"logprobs": True, "return_token_ids": True, "seed": 4, "max_tokens": 12, "ignore_eos": True}


def chat(**changes: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "model": "m"} | ASKED | changes


def test_a_chat_is_generate_over_the_rendered_ids(engine: Engine) -> None:
    answer = engine.post("/v1/chat/completions", chat(top_logprobs=2, temperature=0.8))
    prompt = tokenizer().encode(render(MESSAGES, add_generation_prompt=True)).ids
    same = engine.generate(prompt, seed=4, max_new_tokens=12, ignore_eos=True, temperature=0.8)
    choice = answer["choices"][0]
    assert answer["prompt_token_ids"] == prompt
    assert choice["token_ids"] == same["output_ids"]
    assert choice["message"] == {"role": "assistant", "content": same["text"]}
    assert choice["finish_reason"] == "length"
    assert answer["usage"] == {"prompt_tokens": len(prompt), "completion_tokens": 12, "total_tokens": len(prompt) + 12}
    assert answer["metadata"] == {"weight_version": "1"}
    content = choice["logprobs"]["content"]
    expected = [entry[0] for entry in same["meta_info"]["output_token_logprobs"]]
    assert [entry["logprob"] for entry in content] == pytest.approx(expected, abs=1e-5)
    assert [entry["token"] for entry in content] == [WORDS[token] for token in choice["token_ids"]]
    for entry in content:
        first, second = (top["logprob"] for top in entry["top_logprobs"])
        assert first >= second
        assert entry["logprob"] <= first


def test_a_streamed_chat_adds_up_to_the_whole_one(engine: Engine) -> None:
    whole = engine.post("/v1/chat/completions", chat())
    chunks = list(engine.events("/v1/chat/completions", chat(stream_options={"include_usage": True})))
    assert chunks[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert chunks[-1]["usage"] == whole["usage"]
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["delta"]["content"] for choice in choices) == whole["choices"][0]["message"]["content"]
    assert [token for choice in choices[1:] for token in choice["token_ids"]] == whole["choices"][0]["token_ids"]
    logprobs = [entry["logprob"] for choice in choices[1:] for entry in choice["logprobs"]["content"]]
    expected = [entry["logprob"] for entry in whole["choices"][0]["logprobs"]["content"]]
    assert logprobs == pytest.approx(expected, abs=1e-5)
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert {chunk["metadata"]["weight_version"] for chunk in chunks[:-1]} == {"1"}


def test_ids_come_only_where_they_were_asked_for(engine: Engine) -> None:
    plain = engine.post("/v1/chat/completions", chat(return_token_ids=False, logprobs=False))
    assert "prompt_token_ids" not in plain
    assert "token_ids" not in plain["choices"][0]
    assert plain["choices"][0]["logprobs"] is None
    assert "prompt_token_ids" in engine.post("/v1/chat/completions", chat(return_prompt_token_ids=True))


def test_without_max_tokens_the_context_is_the_limit(engine: Engine) -> None:
    nearly_full = [{"role": "user", "content": "read " * (CONTEXT - 30)}]
    answer = engine.post("/v1/chat/completions", chat(messages=nearly_full, max_tokens=None))
    assert answer["usage"]["total_tokens"] == CONTEXT


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("messages", {"messages": []}),
        ("messages", {"messages": [{"role": "user", "content": "read " * CONTEXT}]}),
        ("temperature", {"temperature": -1}),
        ("max_tokens", {"max_tokens": 0}),
        ("top_logprobs", {"top_logprobs": 99}),
        ("n", {"n": 3}),
    ],
)
def test_bad_chats_are_refused_by_name(engine: Engine, field: str, changes: dict[str, Any]) -> None:
    answer = engine.http.post("/v1/chat/completions", json=chat(**changes))
    assert answer.status_code == 400
    assert answer.json()["message"].startswith(field)
