"""Anthropic Messages: requests to the canonical form, answers back, whole and streamed to the same content blocks."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import groupby
from typing import Any

from polar.protocols import Delta
from polar.proxy.canonical import (
    SSE,
    Answer,
    Ask,
    Kind,
    Message,
    Opening,
    Refusal,
    argument_object,
    data_url,
    field,
    function_tool,
    joined_text,
    json_form,
    needed,
    objects,
    picked,
    refuse,
    spoken,
    text_block,
)

_NUMBER = (int, float)
_SAMPLING: dict[str, tuple[str, Kind]] = {
    "temperature": ("temperature", _NUMBER),
    "top_p": ("top_p", _NUMBER),
    "top_k": ("top_k", int),
    "max_tokens": ("max_tokens", int),
    "stop_sequences": ("stop", list),
}
_STATUS = {
    "bad_request": (400, "invalid_request_error"),
    "unsupported": (400, "invalid_request_error"),
    "too_large": (413, "request_too_large"),
    "unauthorized": (401, "authentication_error"),
    "not_found": (404, "not_found_error"),
    "context": (400, "invalid_request_error"),
    "limit": (403, "permission_error"),
    "busy": (429, "rate_limit_error"),
    "engine": (529, "overloaded_error"),
    "server": (500, "api_error"),
}
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_REFUSED = {
    "mcp_servers": "no server is called from here: the harness has to",
    "container": "nothing is run here",
    "thread": "no conversation is kept: send all of its messages",
    "compaction": "no summaries are made here: ask for one in a message",
}
_NO_PREFILL = "messages: the last one is the assistant's, and no answer goes on in its middle: end with the user's"
_BILLING = "x-anthropic-billing-header:"


class Anthropic:
    name = "anthropic"
    stream_type = SSE

    def parse(self, body: dict[str, Any], path: str) -> Ask:
        messages = _system(body.get("system"))
        for at, message in enumerate(objects(body, "messages")):
            messages += _messages(message, f"messages.{at}")
        if not any(message["role"] != "system" for message in messages):
            raise Refusal("bad_request", "messages: at least one message is required")
        if messages[-1]["role"] == "assistant":
            raise Refusal("unsupported", _NO_PREFILL)
        refuse(body, _REFUSED)
        # What output_config.format is now was output_format in the beta.
        named = field(field(body, "output_config", dict, {}), "format", dict)
        form = field(body, "output_format", dict, {}) if named is None else named
        choice = field(body, "tool_choice", dict, {"type": "auto"})
        return Ask(
            model=needed(body, "model", str),
            messages=messages,
            tools=[_tool(tool, f"tools.{at}") for at, tool in enumerate(objects(body, "tools"))] or None,
            tool_choice=_tool_choice(choice),
            parallel_calls=not field(choice, "disable_parallel_tool_use", bool, False),
            json_schema=json_form(form, "output_config.format", form.get("schema")),
            sampling=picked(body, _SAMPLING),
            stream=field(body, "stream", bool, False),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        message, content = answer.message, []
        if reasoning := message.get("reasoning_content"):
            content.append({"type": "thinking", "thinking": reasoning, "signature": _signature(reasoning)})
        if message["content"]:
            content.append({"type": "text", "text": message["content"]})
        content += [_tool_use(call) | {"input": argument_object(call)} for call in message.get("tool_calls", [])]
        return _head(answer.opening) | {"content": content, "usage": _usage(answer.opening, answer)} | _stop(answer)

    def encoder(self, opening: Opening) -> _Encoder:
        return _Encoder(opening)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"input_tokens": tokens}

    def models(self, names: Sequence[str], created: int) -> dict[str, Any]:
        data = [self.model(name, created) for name in names]
        return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}

    def model(self, name: str, created: int) -> dict[str, Any]:
        since = datetime.fromtimestamp(created, UTC).isoformat()
        return {"type": "model", "id": name, "display_name": name, "created_at": since}

    def error(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        status, kind = _STATUS[refusal.kind]
        return status, {"type": "error", "error": {"type": kind, "message": refusal.message}}


class _Encoder:
    """One content block is open at a time; text and thinking go on in the block that is open."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._index = -1
        self._open: str | None = None
        self._thought = ""

    def start(self) -> bytes:
        message = _head(self._opening) | {"content": [], "stop_reason": None, "stop_sequence": None}
        return _event("message_start", {"message": message | {"usage": _usage(self._opening)}})

    def delta(self, delta: Delta) -> bytes:
        if delta.kind == "text":
            begun = b"" if self._open == "text" else self._begin({"type": "text", "text": ""})
            return begun + self._delta({"type": "text_delta", "text": delta.text})
        if delta.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
            begun = b"" if self._open == "thinking" else self._begin(block)
            self._thought += delta.text
            return begun + self._delta({"type": "thinking_delta", "thinking": delta.text})
        call = delta.call or {}
        arguments = json.dumps(argument_object(call), ensure_ascii=False)
        return self._begin(_tool_use(call)) + self._delta({"type": "input_json_delta", "partial_json": arguments})

    def end(self, answer: Answer) -> bytes:
        last = {"delta": _stop(answer), "usage": _usage(answer.opening, answer)}
        return self._finish() + _event("message_delta", last) + _event("message_stop", {})

    def keep_alive(self) -> bytes:
        return _event("ping", {})

    def error(self, refusal: Refusal) -> bytes:
        return _event("error", Anthropic().error(refusal)[1])

    def _begin(self, block: dict[str, Any]) -> bytes:
        finished = self._finish()
        self._index += 1
        self._open = block["type"]
        return finished + _event("content_block_start", {"index": self._index, "content_block": block})

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", {"index": self._index, "delta": delta})

    def _finish(self) -> bytes:
        if self._open is None:
            return b""
        signed = b""
        if self._open == "thinking":
            signed = self._delta({"type": "signature_delta", "signature": _signature(self._thought)})
        self._open, self._thought = None, ""
        return signed + _event("content_block_stop", {"index": self._index})


def _event(kind: str, document: dict[str, Any]) -> bytes:
    data = json.dumps({"type": kind} | document, ensure_ascii=False, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode()


def _head(opening: Opening) -> dict[str, Any]:
    return {"id": f"msg_{opening.id}", "type": "message", "role": "assistant", "model": opening.model}


def _usage(opening: Opening, answer: Answer | None = None) -> dict[str, Any]:
    cached = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
    given = {"input_tokens": opening.prompt_tokens, "output_tokens": answer.completion_tokens if answer else 0} | cached
    return given | ({"output_tokens_details": {"thinking_tokens": answer.reasoning_tokens}} if answer else {})


def _stop(answer: Answer) -> dict[str, Any]:
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    reason = reasons.get(answer.finish_reason) or ("stop_sequence" if answer.matched else "end_turn")
    return {"stop_reason": reason, "stop_sequence": answer.matched if reason == "stop_sequence" else None}


def _tool_use(call: dict[str, Any]) -> dict[str, Any]:
    return {"type": "tool_use", "id": call["id"], "name": call["function"]["name"], "input": {}}


def _signature(reasoning: str) -> str:
    """Clients give it back with the thinking; it says that the text is unchanged."""
    return base64.b64encode(hashlib.sha256(reasoning.encode()).digest()).decode()


def _system(system: Any) -> list[Message]:
    text = joined_text(_without_billing_header(system), "system", text_block)
    return [{"role": "system", "content": text}] if text else []


def _without_billing_header(system: Any) -> Any:
    """Claude Code puts a line into the first system block that differs with every request and is not for the model
    (case 25)."""
    if isinstance(system, str) and system.startswith(_BILLING):
        return system.partition("\n")[2]
    if isinstance(system, list) and system and isinstance(system[0], dict):
        text = system[0].get("text")
        if isinstance(text, str) and text.startswith(_BILLING):
            rest = text.partition("\n")[2]
            return [{**system[0], "text": rest}, *system[1:]] if rest else system[1:]
    return system


def _messages(message: dict[str, Any], where: str) -> list[Message]:
    role, content = message.get("role"), message.get("content")
    if role == "system":
        return [{"role": "system", "content": joined_text(content, f"{where}.content", text_block)}]
    blocks = [{"type": "text", "text": content}] if isinstance(content, str) else objects(message, "content")
    if role == "assistant":
        return [_assistant(blocks, where)]
    if role != "user":
        raise Refusal("bad_request", f"{where}.role: {role!r} is not a role")
    return _user(blocks, where)


def _user(blocks: list[dict[str, Any]], where: str) -> list[Message]:
    """Tool results are messages of their own in the canonical form; the text between them is the user's."""
    messages: list[Message] = []
    for results, group in groupby(blocks, key=lambda block: block.get("type") == "tool_result"):
        if results:
            messages += [_result(block, where) for block in group]
        else:
            messages.append({"role": "user", **spoken(list(group), f"{where}.content", _image)})
    return messages or [{"role": "user", "content": ""}]


def _result(block: dict[str, Any], where: str) -> Message:
    said = spoken(block.get("content"), f"{where}.content", _image)
    return {"role": "tool", **said, "tool_call_id": needed(block, "tool_use_id", str)}


def _image(block: dict[str, Any]) -> str | None:
    if block.get("type") != "image":
        return None
    source = needed(block, "source", dict)
    if source.get("type") == "url":
        return str(needed(source, "url", str))
    return data_url(source.get("media_type"), source.get("data"), "image.source")


def _assistant(blocks: list[dict[str, Any]], where: str) -> Message:
    texts, thoughts, calls = [], [], []
    for at, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "thinking":
            thoughts.append(field(block, "thinking", str, ""))
        elif kind == "tool_use":
            arguments = json.dumps(field(block, "input", dict, {}), ensure_ascii=False)
            function = {"name": needed(block, "name", str), "arguments": arguments}
            calls.append({"id": needed(block, "id", str), "type": "function", "function": function})
        elif kind != "redacted_thinking":
            texts.append(text_block(block, f"{where}.content.{at}"))
    message: Message = {"role": "assistant", "content": "\n".join(texts)}
    message |= {"reasoning_content": "\n".join(thoughts)} if any(thoughts) else {}
    return message | ({"tool_calls": calls} if calls else {})


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise Refusal("unsupported", f"{where}: tools of type {tool['type']!r} are not supported")
    return function_tool(needed(tool, "name", str, where), tool.get("description"), tool.get("input_schema"), where)


def _tool_choice(choice: dict[str, Any]) -> Any:
    kind = choice.get("type")
    if kind == "tool":
        return {"name": needed(choice, "name", str)}
    if kind not in _CHOICES:
        raise Refusal("bad_request", f"tool_choice.type: {kind!r} is not a choice")
    return _CHOICES[kind]
