"""An answer as its client has it: read off a whole one, and off the events of a stream, in each dialect."""

from __future__ import annotations

import contextlib
import json
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec

from dialects import PATHS, STREAMED
from peers.engine import ScriptedEngine
from running_proxy import OpenSession, until

Document = dict[str, Any]


class Said(msgspec.Struct, kw_only=True):
    """`calls`: [name, arguments] each; `order`: the kinds of content as they came; `end`: the dialect's word for why
    it ended; `error`: that of a stream that could not go on."""

    reasoning: str = ""
    text: str = ""
    calls: list[tuple[str, Any]] = []
    order: list[str] = []
    end: str | None = None
    error: str | None = None

    def add(self, kind: str, text: str) -> None:
        if text:
            setattr(self, kind, getattr(self, kind) + text)
            self._next(kind)

    def call(self, name: str, arguments: Any) -> None:
        self.calls.append((name, arguments))
        self._next("call")

    def _next(self, kind: str) -> None:
        if self.order[-1:] != [kind]:
            self.order.append(kind)


def of_whole(dialect: str, document: Document) -> Said:
    said = Said()
    _WHOLE[dialect](said, document)
    return said


def of_stream(dialect: str, data: bytes) -> Said:
    """As far as its events are there."""
    said = Said()
    for block in data.split(b"\n\n")[:-1]:
        lines = [line for line in block.split(b"\n") if line and not line.startswith((b":", b"event:"))]
        for line in lines:
            text = line.removeprefix(b"data: ")
            if text != b"[DONE]":
                _EVENTS[dialect](said, json.loads(text))
    return said


class Stream:
    """A streamed answer that is being read; `data` so far."""

    def __init__(self, dialect: str, response: httpx.Response) -> None:
        self.data = b""
        self._dialect = dialect
        self._chunks = response.iter_raw()

    @property
    def said(self) -> Said:
        return of_stream(self._dialect, self.data)

    def until(self, holds: Callable[[Said], bool]) -> Said:
        deadline = time.monotonic() + 30
        while not holds(said := self.said):
            assert time.monotonic() < deadline, f"it did not come: {said}"
            self.data += next(self._chunks)
        return said

    def rest(self) -> Said:
        self.data += b"".join(self._chunks)
        return self.said


@contextlib.contextmanager
def streaming(session: OpenSession, dialect: str, document: Document) -> Iterator[Stream]:
    """Leaving it early hangs up."""
    url = session.url + STREAMED.get(dialect, PATHS[dialect])
    asked, auth = document | {"stream": True}, {"Authorization": f"Bearer {session.key}"}
    with httpx.stream("POST", url, json=asked, headers=auth, timeout=30, trust_env=False) as response:
        assert response.status_code == 200, response.read()
        yield Stream(dialect, response)


def hang_up(session: OpenSession, dialect: str, document: Document, engine: ScriptedEngine) -> None:
    """Sends a request, waits until the engine has it, and closes the socket before anything has come back."""
    before, data = len(engine.requests), json.dumps(document).encode()
    host, _, port = session.url.removeprefix("http://").partition(":")
    path = STREAMED.get(dialect, PATHS[dialect]) if document.get("stream") else PATHS[dialect]
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nx-api-key: {session.key}\r\nContent-Length: {len(data)}\r\n\r\n"
    with socket.create_connection((host, int(port))) as sock:
        sock.sendall(head.encode() + data)
        until(lambda: len(engine.requests) > before)


def _chat_whole(said: Said, document: Document) -> None:
    choice = document["choices"][0]
    message = choice["message"]
    said.add("reasoning", message.get("reasoning_content") or "")
    said.add("text", message["content"] or "")
    for call in message.get("tool_calls") or []:
        said.call(call["function"]["name"], call["function"]["arguments"])
    said.end = choice["finish_reason"]


def _chat_event(said: Said, event: Document) -> None:
    if "error" in event:
        said.error = event["error"]["message"]
        return
    for choice in event["choices"]:
        delta = choice["delta"]
        said.add("reasoning", delta.get("reasoning_content") or "")
        said.add("text", delta.get("content") or "")
        for call in delta.get("tool_calls") or []:
            assert call["index"] == len(said.calls), "a call is whole"
            said.call(call["function"]["name"], call["function"]["arguments"])
        said.end = choice["finish_reason"] or said.end


def _responses_whole(said: Said, document: Document) -> None:
    for item in document["output"]:
        if item["type"] == "function_call":
            said.call(item["name"], item["arguments"])
        else:
            kind = "reasoning" if item["type"] == "reasoning" else "text"
            said.add(kind, "".join(part["text"] for part in item["content"]))
    said.end = document["status"]


def _responses_event(said: Said, event: Document) -> None:
    kind = event["type"].removeprefix("response.")
    if kind in ("reasoning_text.delta", "output_text.delta"):
        said.add("reasoning" if kind.startswith("reasoning") else "text", event["delta"])
    elif kind == "output_item.done" and event["item"]["type"] == "function_call":
        said.call(event["item"]["name"], event["item"]["arguments"])
    elif kind in ("completed", "incomplete"):
        said.end = event["response"]["status"]
    elif kind == "failed":
        said.error = event["response"]["error"]["message"]


def _anthropic_whole(said: Said, document: Document) -> None:
    for block in document["content"]:
        if block["type"] == "tool_use":
            said.call(block["name"], block["input"])
        elif block["type"] == "thinking":
            said.add("reasoning", block["thinking"])
        else:
            said.add("text", block["text"])
    said.end = document["stop_reason"]


def _anthropic_event(said: Said, event: Document) -> None:
    if event["type"] == "error":
        said.error = event["error"]["message"]
    elif event["type"] == "content_block_start" and event["content_block"]["type"] == "tool_use":
        said.call(event["content_block"]["name"], {})
    elif event["type"] == "content_block_delta":
        delta = event["delta"]
        said.add("text", delta.get("text") or "")
        said.add("reasoning", delta.get("thinking") or "")
        if "partial_json" in delta:
            said.calls[-1] = (said.calls[-1][0], json.loads(delta["partial_json"]))
    elif event["type"] == "message_delta":
        said.end = event["delta"]["stop_reason"]


def _gemini(said: Said, event: Document) -> None:
    if "error" in event:
        said.error = event["error"]["message"]
        return
    [candidate] = event["candidates"]
    for part in candidate["content"]["parts"]:
        if "functionCall" in part:
            said.call(part["functionCall"]["name"], part["functionCall"]["args"])
        else:
            said.add("reasoning" if part.get("thought") else "text", part["text"])
    said.end = candidate.get("finishReason") or said.end


_WHOLE: dict[str, Callable[[Said, Document], None]] = {
    "openai_chat": _chat_whole,
    "openai_responses": _responses_whole,
    "anthropic": _anthropic_whole,
    "gemini": _gemini,
}
_EVENTS: dict[str, Callable[[Said, Document], None]] = {
    "openai_chat": _chat_event,
    "openai_responses": _responses_event,
    "anthropic": _anthropic_event,
    "gemini": _gemini,
}
