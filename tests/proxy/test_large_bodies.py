"""No body, however large or however packed, costs more than its bound; and whatever is wrong with a request below the
APIs is told in the words of the API that was called, once, with nothing in the log but a line."""

from __future__ import annotations

import gzip
import json
import logging
import re
import socket
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from dialects import PATHS, body, post
from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy, user

CONTEXT = 300
LIMIT = 64 << 20
COUNTS = {
    "openai_responses": "/v1/responses/input_tokens",
    "anthropic": "/v1/messages/count_tokens",
    "gemini": "/v1beta/models/policy:countTokens",
}
in_every_dialect = pytest.mark.parametrize("dialect", list(PATHS))


@pytest.fixture(scope="module")
def peer(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer) as made:
        yield made


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, peer: ScriptedEngine, rendering: Rendering
) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path_factory.mktemp("house"), peer.url, rendering, context_length=CONTEXT) as made:
        yield made


def asked(text: str = "x", **fields: Any) -> dict[str, Any]:
    return body(text, max_tokens=50, **fields)


def sent(session: OpenSession, dialect: str, content: bytes | Iterator[bytes], **headers: str) -> httpx.Response:
    """Headers are written with underscores."""
    named = {"Authorization": f"Bearer {session.key}"} | {name.replace("_", "-"): it for name, it in headers.items()}
    with httpx.Client(trust_env=False, timeout=60) as client:
        return client.post(session.url + PATHS[dialect], content=content, headers=named)


def told(dialect: str, answer: httpx.Response, status: int) -> str:
    """The message of an error that is of the dialect's own shape, and of which no SDK asks again."""
    assert (answer.status_code, answer.headers["x-should-retry"]) == (status, "false")
    document = answer.json()
    kind = {
        "anthropic": "request_too_large" if status == 413 else "invalid_request_error",
        "gemini": "INVALID_ARGUMENT",
    }.get(dialect, "invalid_request_error")
    error = document["error"]
    assert kind == error["status" if dialect == "gemini" else "type"]
    assert dialect != "anthropic" or document["type"] == "error"
    assert dialect != "gemini" or error["code"] == status
    return error["message"]


@pytest.mark.parametrize("text", ["hello", "no merges ", "<|im_end|>", "hé🙂 ", " \n"])
def test_texts_take_more_tokens_than_is_said_at_first_sight(rendering: Rendering, text: str) -> None:
    texts = [text * 30_000, "and more"]
    exact = len(rendering.render([user(each) for each in texts], None))
    assert exact // 4 < rendering.least_tokens(texts, 10**6) < exact
    assert 100 < rendering.least_tokens(texts, 100) < exact
    assert rendering.least_tokens(["x"], 100) <= 1


LONG = "hello" * 1000
"""1000 tokens"""
DENSE = 8 * (CONTEXT + 1) * "x"


@in_every_dialect
def test_a_text_that_no_context_can_hold_is_refused_before_its_tokens_are_counted(
    house: RunningProxy, peer: ScriptedEngine, dialect: str
) -> None:
    session, before = house.open(), len(peer.requests)
    for text in (LONG, DENSE):
        message = told(dialect, post(session, dialect, asked(text)), 400)
        least = re.search(rf"prompt is too long: at least (\d+) tokens > {CONTEXT} maximum", message)
        assert least is not None
        assert CONTEXT < int(least[1]) <= (1000 if text is LONG else len(DENSE))
    record, log = session.end()
    assert record.context
    assert [refused.reason for refused in log.refusals] == ["context"] * 2
    assert len(peer.requests) == before


def test_so_are_more_messages_than_it_has_tokens(house: RunningProxy) -> None:
    messages = [user("")] * (CONTEXT + 1)
    answer = post(house.open(), "openai_chat", asked(messages=messages))
    assert f"at least {CONTEXT + 1} tokens" in told("openai_chat", answer, 400)


def test_tools_are_text_too(house: RunningProxy) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": LONG}}]
    assert "at least" in told("openai_chat", post(house.open(), "openai_chat", asked(tools=tools)), 400)


@pytest.mark.parametrize("dialect", COUNTS)
def test_what_is_only_counted_may_be_longer_up_to_a_million_tokens(house: RunningProxy, dialect: str) -> None:
    assert house.open().post(asked(LONG), COUNTS[dialect]).status_code == 200
    message = told(dialect, house.open().post(asked("hello" * 2_800_000), COUNTS[dialect]), 400)
    assert "> 1048576 that are counted" in message


def thinking(times: int, tokens: int) -> dict[str, Any]:
    """A history that the template writes without its thoughts."""
    turn = [{"role": "assistant", "content": "a", "reasoning_content": "x" * tokens}, user("b")]
    return asked(messages=[user("a"), *turn * times])


@pytest.mark.parametrize(
    ("times", "tokens", "status"), [(12, CONTEXT, 200), (3, 9 * CONTEXT, 400), (500, CONTEXT, 400)]
)
def test_thoughts_that_are_left_out_are_no_text_unless_nobody_can_have_had_them(
    house: RunningProxy, times: int, tokens: int, status: int
) -> None:
    answer = post(house.open(), "openai_chat", thinking(times, tokens))
    assert (answer.status_code, "at least" in answer.text) == (status, status == 400)


def test_ids_of_calls_are_no_text(house: RunningProxy) -> None:
    """Most of what such a history takes on the wire, and nothing of its prompt."""
    messages = [user("a")]
    for at in range(2):
        call = {"id": f"{at}{'x' * 3 * CONTEXT}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
        messages += [{"role": "assistant", "content": "", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": call["id"], "content": "r"}]
    assert post(house.open(), "openai_chat", asked(messages=messages)).status_code == 200


def test_a_large_body_of_little_text_is_no_long_prompt(house: RunningProxy) -> None:
    session = house.open()
    session.turn([user("x")], metadata={"note": LONG})
    assert session.end()[0].completions == 1


BOMB = gzip.compress(b" " * (LIMIT + 1), 1)


@in_every_dialect
def test_a_body_beyond_the_limit_is_refused(house: RunningProxy, dialect: str) -> None:
    session = house.open()
    assert "64 MiB" in told(dialect, announced(session, dialect, LIMIT + 1), 413)
    record, log = session.end()
    assert (record.fault, len(log.refusals)) == (None, 1)


def test_so_is_a_small_one_that_unpacks_to_more(house: RunningProxy) -> None:
    assert "64 MiB" in told("openai_chat", sent(house.open(), "openai_chat", BOMB, content_encoding="gzip"), 413)


def announced(session: OpenSession, dialect: str, length: int) -> httpx.Response:
    """What is said to a client that has sent nothing but the length so far."""
    head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\nConnection: close\r\n"
    return spoken(session, f"{head}Authorization: Bearer {session.key}\r\n\r\n".encode())


def spoken(session: OpenSession, request: bytes) -> httpx.Response:
    """The answer to bytes on a socket."""
    url = httpx.URL(session.url)
    with socket.create_connection((url.host, url.port or 80), timeout=20) as sock:
        sock.sendall(request)
        answer = b""
        while b"}}" not in answer:
            got = sock.recv(65536)
            assert got, answer
            answer += got
    head, _, content = answer.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    pairs = [tuple(line.split(": ", 1)) for line in lines]
    return httpx.Response(int(first.split()[1]), headers=pairs, content=content)


def test_a_body_beyond_the_limit_without_a_length_is_refused_too(house: RunningProxy) -> None:
    pieces = (b" " * (1 << 20) for _ in range(65))
    assert "64 MiB" in told("openai_chat", sent(house.open(), "openai_chat", pieces), 413)


PACKED = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "identity": bytes,
    "GZIP": lambda content: gzip.compress(content[:9]) + gzip.compress(content[9:]),
}


@pytest.mark.parametrize("encoding", PACKED)
def test_a_packed_body_is_read(house: RunningProxy, encoding: str) -> None:
    session = house.open()
    content = PACKED[encoding](json.dumps(asked("packed")).encode())
    assert sent(session, "openai_chat", content, content_encoding=encoding).status_code == 200
    assert session.log.calls[0].opened.messages[-1]["content"] == "packed"


@in_every_dialect
@pytest.mark.parametrize(
    ("encoding", "content", "words"),
    [
        ("gzip", b"{}", "not what its Content-Encoding says"),
        ("gzip", gzip.compress(b'{"model": "policy"}', mtime=0)[:-9], "not what its Content-Encoding says"),
        ("br", b"{}", "Content-Encoding: 'br' is not read here"),
    ],
)
def test_a_body_that_cannot_be_unpacked_is_the_callers_mistake(
    house: RunningProxy, caplog: pytest.LogCaptureFixture, dialect: str, encoding: str, content: bytes, words: str
) -> None:
    session = house.open()
    assert words in told(dialect, sent(session, dialect, content, content_encoding=encoding), 400)
    assert session.end()[0].refused == 1
    assert not caplog.records


@in_every_dialect
@pytest.mark.parametrize("broken", ["header", "chunk", "no http"])
def test_what_is_no_http_is_told_so_that_every_client_understands(
    house: RunningProxy, caplog: pytest.LogCaptureFixture, dialect: str, broken: str
) -> None:
    session = house.open()
    head = f"POST {PATHS[dialect]} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {session.key}\r\n"
    requests = {
        "header": f"{head}x-note: {'n' * 70_000}\r\n\r\n",
        "chunk": f"{head}Transfer-Encoding: chunked\r\n\r\nno number\r\n",
        "no http": "\x16\x03\x01\r\n\r\n",
    }
    message = told(dialect, spoken(session, requests[broken].encode()), 400)
    assert ("64 KiB" in message) == (broken == "header")
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


def test_a_header_of_some_kilobytes_is_none_of_ours(house: RunningProxy) -> None:
    content = json.dumps(asked()).encode()
    assert sent(house.open(), "openai_chat", content, baggage="n" * 30_000).status_code == 200


def test_an_sdk_asks_once_and_knows_the_error(house: RunningProxy) -> None:
    session = house.open()
    with pytest.raises(openai.BadRequestError, match="64 KiB"):
        openai.OpenAI(base_url=session.url + "/v1", api_key=session.key).chat.completions.create(
            model="policy", messages=[{"role": "user", "content": "x"}], extra_headers={"x-note": "n" * 70_000}
        )
    with pytest.raises(anthropic.RequestTooLargeError, match="64 MiB"):
        anthropic.Anthropic(base_url=session.url, api_key=session.key).messages.create(
            model="policy", max_tokens=50, messages=[{"role": "user", "content": "x" * LIMIT}]
        )
    assert session.end()[0].refused == 1
