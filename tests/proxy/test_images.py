"""Images: to engines that take messages as they stand, in every dialect; refused by name elsewhere; never trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from dialects import PATHS, post
from peers.engine import ScriptedEngine
from polar.proxy.forms import NOT_SHOWN
from running_proxy import OpenSession, RunningProxy, running_proxy

PIXEL = "iVBORw0KGgo="
URL = f"data:image/png;base64,{PIXEL}"
ANTHROPICS = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
SEEN = "what is this?"
ASKED: dict[str, dict[str, Any]] = {
    "openai_chat": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "text", "text": SEEN}, {"type": "image_url", "image_url": {"url": URL}}],
            }
        ]
    },
    "openai_responses": {
        "input": [
            {
                "role": "user",
                "content": [{"type": "input_text", "text": SEEN}, {"type": "input_image", "image_url": URL}],
            }
        ]
    },
    "anthropic": {
        "messages": [{"role": "user", "content": [{"type": "text", "text": SEEN}, ANTHROPICS]}],
        "max_tokens": 50,
    },
    "gemini": {"contents": [{"parts": [{"text": SEEN}, {"inline_data": {"mime_type": "image/png", "data": PIXEL}}]}]},
}
RESULTS: dict[str, dict[str, Any]] = {
    "openai_responses": {
        "input": [
            {"role": "user", "content": "look"},
            {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [{"type": "input_image", "image_url": URL}]},
        ]
    },
    "anthropic": {
        "messages": [
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [ANTHROPICS]}]},
        ],
        "max_tokens": 50,
    },
    "gemini": {
        "contents": [
            {"role": "user", "parts": [{"text": "look"}]},
            {"role": "model", "parts": [{"functionCall": {"id": "c1", "name": "look", "args": {}}}]},
            {
                "role": "user",
                "parts": [
                    {
                        "functionResponse": {
                            "id": "c1",
                            "name": "look",
                            "response": {"output": ""},
                            "parts": [{"inlineData": {"mimeType": "image/png", "data": PIXEL}}],
                        }
                    }
                ],
            },
        ]
    },
}
IMAGE = {"type": "image_url", "image_url": {"url": URL}}
BOTH = pytest.mark.parametrize("kind", ["vllm", "openai"])


def ask(session: OpenSession, dialect: str, document: dict[str, Any]) -> httpx.Response:
    return post(session, dialect, {"model": "policy", **document})


@BOTH
@pytest.mark.parametrize("dialect", ASKED)
def test_an_engine_of_messages_gets_them_in_their_places(
    engine: ScriptedEngine, tmp_path: Path, kind: str, dialect: str
) -> None:
    with running_proxy(tmp_path, engine.url, None, engine=kind, context_length=None) as proxy:
        session = proxy.open()
        assert ask(session, dialect, ASKED[dialect]).status_code == 200
        assert engine.requests[0]["messages"] == [{"role": "user", "content": [{"type": "text", "text": SEEN}, IMAGE]}]
        _, log = session.end()
        assert log.messages(log.calls[0])[0]["parts"][1] == IMAGE
        built = session.build()
        sampled = len(log.calls[0].ids)
        assert built.tokens.excluded == ({"images": sampled} if sampled else {})


@pytest.mark.parametrize("dialect", RESULTS)
def test_results_of_tools_may_be_images(engine: ScriptedEngine, chat_proxy: RunningProxy, dialect: str) -> None:
    assert ask(chat_proxy.open(), dialect, RESULTS[dialect]).status_code == 200
    assert engine.requests[0]["messages"][-1] == {"role": "tool", "content": [IMAGE], "tool_call_id": "c1"}


@pytest.mark.parametrize("dialect", ASKED)
def test_an_engine_of_ids_refuses_them_by_name(engine: ScriptedEngine, proxy: RunningProxy, dialect: str) -> None:
    session = proxy.open()
    refused = ask(session, dialect, ASKED[dialect])
    assert (refused.status_code, "images" in refused.text) == (400, True)
    assert not engine.requests
    assert {refusal.reason for refusal in session.log.refusals} == {"unsupported"}


@pytest.mark.parametrize("dialect", RESULTS)
def test_a_model_that_looked_at_an_image_itself_is_told_and_goes_on(
    engine: ScriptedEngine, proxy: RunningProxy, dialect: str
) -> None:
    """Codex's view_image, Read of Claude Code, read_file of Gemini CLI: a refusal would end their runs."""
    session = proxy.open()
    counted = session.post({"model": "policy", **RESULTS[dialect]}, COUNTS[dialect]) if dialect in COUNTS else None
    assert ask(session, dialect, RESULTS[dialect]).status_code == 200
    [call] = session.end()[1].calls
    shown = session.log.messages(call)[2]
    assert (shown["role"], "parts" in shown, NOT_SHOWN in shown["content"]) == ("tool", False, True)
    assert counted is None or counted.json()["input_tokens"] == call.prompt_length
    assert session.build().tokens.trainable == len(call.ids)


def test_an_image_sent_behind_a_result_is_the_tools_too(engine: ScriptedEngine, proxy: RunningProxy) -> None:
    """Chat completions have no images in results: clients send a message of the user's behind them."""
    session = proxy.open()
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "look"}]}
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    asked["messages"] += [{"role": "assistant", "content": None, "tool_calls": [call]}]
    asked["messages"] += [{"role": "tool", "tool_call_id": "c1", "content": "see below"}]
    asked["messages"] += [{"role": "user", "content": [IMAGE]}]
    assert ask(session, "openai_chat", asked).status_code == 200
    asked["messages"] += [{"role": "assistant", "content": "ok"}, {"role": "user", "content": [IMAGE]}]
    assert ask(session, "openai_chat", asked).status_code == 400


COUNTS = {"openai_responses": "/v1/responses/input_tokens", "anthropic": "/v1/messages/count_tokens"}


@pytest.mark.parametrize("dialect", COUNTS)
def test_images_are_not_left_out_of_a_count(proxy: RunningProxy, dialect: str) -> None:
    refused = proxy.open().post({"model": "policy", **ASKED[dialect]}, COUNTS[dialect])
    assert (refused.status_code, "images" in refused.text) == (400, True)


def test_another_image_is_another_conversation(engine: ScriptedEngine, chat_proxy: RunningProxy) -> None:
    session = chat_proxy.open()
    other = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": URL.replace("g", "h")}}]}
    first = {"role": "user", "content": [IMAGE]}
    for message in (first, other, first):
        answer = ask(session, "openai_chat", {"messages": [message]}).json()["choices"][0]["message"]
    ask(session, "openai_chat", {"messages": [first, answer, {"role": "user", "content": "and?"}]})
    _, log = session.end()
    assert [call.opened.messages_keep for call in log.calls] == [0, 0, 1, 2]
    assert log.calls[3].prompt.expected == 3


UNREADABLE: list[tuple[str, dict[str, Any], str]] = [
    ("openai_chat", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]}, "url"),
    ("openai_responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]}, "file"),
    ("gemini", {"contents": [{"parts": [{"inlineData": {"mimeType": "audio/wav", "data": "AA"}}]}]}, "audio/wav"),
    ("gemini", {"contents": [{"parts": [{"fileData": {"fileUri": "x"}}]}]}, "fileData"),
]


@pytest.mark.parametrize(("dialect", "document", "name"), UNREADABLE)
def test_what_is_no_image_is_refused_by_name(
    chat_proxy: RunningProxy, dialect: str, document: dict[str, Any], name: str
) -> None:
    refused = chat_proxy.open().post({"model": "policy", **document}, PATHS[dialect])
    assert (refused.status_code, name in refused.text) == (400, True)
