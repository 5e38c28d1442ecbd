"""Which API a path speaks, and what is answered where there is none: always in words that its client understands."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from running_proxy import OpenSession, RunningProxy

ANTHROPIC, GOOGLE = {"anthropic-version": "2023-06-01"}, {"x-goog-api-key": "KEY"}


def get(session: OpenSession, method: str, path: str, headers: dict[str, str]) -> httpx.Response:
    named = {name: value.replace("KEY", session.key) for name, value in headers.items()}
    own = named if "x-goog-api-key" in named else {"Authorization": f"Bearer {session.key}"} | named
    return httpx.request(method, session.url + path, headers=own, trust_env=False)


def shape(document: dict[str, Any]) -> str:
    if document.get("type") == "error":
        return "anthropic"
    return "gemini" if "status" in document["error"] else "openai"


@pytest.mark.parametrize(
    ("method", "path", "headers", "whose"),
    [
        ("GET", "/v1/chat/completions", {}, "openai"),
        ("POST", "/v1/embeddings", {}, "openai"),
        ("GET", "/v1/responses/resp_1", {}, "openai"),
        ("GET", "/v1/models/other", {}, "openai"),
        ("GET", "/v1/models/other", ANTHROPIC, "anthropic"),
        ("GET", "/v1/models/other", GOOGLE, "gemini"),
        ("GET", "/v1/messages", {}, "anthropic"),
        ("POST", "/v1/messages/batches", {}, "anthropic"),
        ("POST", "/v1/complete", ANTHROPIC, "anthropic"),
        ("POST", "/v1beta/models/policy:embedContent", {}, "gemini"),
        ("GET", "/v1beta/models/policy:generateContent", {}, "gemini"),
        ("POST", "/v1alpha/files", {}, "gemini"),
    ],
)
def test_what_is_not_there_is_said_in_the_words_of_its_api(
    proxy: RunningProxy, method: str, path: str, headers: dict[str, str], whose: str
) -> None:
    session = proxy.open()
    answer = get(session, method, path, headers)
    assert (answer.status_code, shape(answer.json())) == (404, whose)
    session.end()
    ended = get(session, method, path, headers)
    assert (ended.status_code, shape(ended.json())) == (401, whose)


def test_a_harness_finds_its_model_under_every_name_that_it_may_know(proxy: RunningProxy) -> None:
    session = proxy.open(agent={"harness": "shell", "custom_shell": {"command": "true"}, "model_name": "org/small"})
    names = ["policy", "org/small", "policy-aux", "org/small-aux"]
    listed = get(session, "GET", "/v1/models", {}).json()
    assert (listed["object"], [model["id"] for model in listed["data"]]) == ("list", names)
    listed = get(session, "GET", "/v1/models", ANTHROPIC).json()
    assert (listed["has_more"], [model["id"] for model in listed["data"]]) == (False, names)
    listed = get(session, "GET", "/v1beta/models", GOOGLE).json()
    assert [model["name"] for model in listed["models"]] == [f"models/{name}" for name in names]
    assert get(session, "GET", "/v1/models/org/small", {}).json()["id"] == "org/small"
    assert get(session, "GET", "/v1beta/models/org/small-aux", GOOGLE).json()["name"] == "models/org/small-aux"
