"""OpenAI chat completions: requests to the canonical form, answers back, whole and streamed to the same message."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
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
    "min_p": ("min_p", _NUMBER),
    "max_tokens": ("max_tokens", int),
    "max_completion_tokens": ("max_tokens", int),
    "stop": ("stop", (str, list)),
    "stop_token_ids": ("stop_token_ids", list),
    "seed": ("seed", int),
    "frequency_penalty": ("frequency_penalty", _NUMBER),
    "presence_penalty": ("presence_penalty", _NUMBER),
    "repetition_penalty": ("repetition_penalty", _NUMBER),
    "logit_bias": ("logit_bias", dict),
    "ignore_eos": ("ignore_eos", bool),
}
_FORM = "send it as response_format"
_REFUSED = {
    "functions": "send them as tools",
    "function_call": "send it as tool_choice",
    "audio": "this model gives text",
    "web_search_options": "no search can be run here",
    "chat_template_kwargs": "the model's template is used as it stands",
    "continue_final_message": "an answer begins anew behind the last message",
    "documents": "send their text in messages",
    "min_tokens": "the policy ends its answers itself",
    "lora_path": "the policy is the model as it is served",
    "custom_logit_processor": "tokens are sampled by temperature, top_p, top_k, min_p, penalties and logit_bias",
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice", "guided_grammar"), _FORM),
    **dict.fromkeys(("regex", "ebnf"), _FORM),
}
_STATUS = {
    "bad_request": (400, "invalid_request_error", None),
    "unsupported": (400, "invalid_request_error", "unsupported_value"),
    "too_large": (413, "invalid_request_error", "request_too_large"),
    "unauthorized": (401, "invalid_request_error", "invalid_api_key"),
    "not_found": (404, "invalid_request_error", "not_found"),
    "context": (400, "invalid_request_error", "context_length_exceeded"),
    "limit": (403, "permission_error", "session_limit"),
    "busy": (429, "rate_limit_error", "concurrent_calls"),
    "engine": (502, "server_error", "engine_error"),
    "server": (500, "server_error", "internal_error"),
}


class OpenAI:
    """What both of OpenAI's APIs say alike."""

    stream_type = SSE

    def count(self, tokens: int) -> dict[str, Any]:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def models(self, names: Sequence[str], created: int) -> dict[str, Any]:
        return {"object": "list", "data": [self.model(name, created) for name in names]}

    def model(self, name: str, created: int) -> dict[str, Any]:
        return {"id": name, "object": "model", "created": created, "owned_by": "polar"}

    def error(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        status, kind, code = _STATUS[refusal.kind]
        return status, {"error": {"message": refusal.message, "type": kind, "param": None, "code": code}}


class OpenAIChat(OpenAI):
    name = "openai_chat"

    def parse(self, body: dict[str, Any], path: str) -> Ask:
        for name in ("n", "best_of"):
            if field(body, name, int, 1) != 1:
                raise Refusal("unsupported", f"{name}: one answer a request; send more requests instead")
        refuse(body, _REFUSED)
        if other := [form for form in field(body, "modalities", list, []) if form != "text"]:
            raise Refusal("unsupported", f"modalities: {other[0]!r} is not supported: this model gives text")
        form = field(body, "response_format", dict, {})
        messages = [_message(message, f"messages.{at}") for at, message in enumerate(objects(body, "messages"))]
        if not messages:
            raise Refusal("bad_request", "messages: at least one message is required")
        tools = [_tool(tool, f"tools.{at}") for at, tool in enumerate(objects(body, "tools"))]
        choice, left = _tool_choice(field(body, "tool_choice", (str, dict), "auto"), tools)
        return Ask(
            model=needed(body, "model", str),
            messages=messages,
            tools=left or None,
            tool_choice=choice,
            parallel_calls=field(body, "parallel_tool_calls", bool, True),
            json_schema=json_form(form, "response_format", field(form, "json_schema", dict, {}).get("schema")),
            sampling=picked(body, _SAMPLING),
            stream=field(body, "stream", bool, False),
            usage_in_stream=field(field(body, "stream_options", dict, {}), "include_usage", bool, False),
            logprobs=field(body, "logprobs", bool, False),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        message = {"role": "assistant", "content": answer.message["content"] or None, "refusal": None}
        if reasoning := answer.message.get("reasoning_content"):
            message["reasoning_content"] = reasoning
        if calls := answer.message.get("tool_calls"):
            message["tool_calls"] = calls
        elif message["content"] is None:
            message["content"] = ""
        choice = {"index": 0, "message": message, "finish_reason": answer.finish_reason, "logprobs": _logprobs(answer)}
        return _frame(answer.opening, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}

    def encoder(self, opening: Opening) -> _Encoder:
        return _Encoder(opening)


class _Encoder:
    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._frame = _frame(opening, "chat.completion.chunk")
        self._calls = 0

    def start(self) -> bytes:
        return self._chunk({"role": "assistant", "content": ""})

    def delta(self, delta: Delta) -> bytes:
        if delta.kind == "reasoning":
            return self._chunk({"reasoning_content": delta.text})
        if delta.kind == "text":
            return self._chunk({"content": delta.text})
        self._calls += 1
        return self._chunk({"tool_calls": [{"index": self._calls - 1, **(delta.call or {})}]})

    def end(self, answer: Answer) -> bytes:
        last = self._chunk({}, answer.finish_reason, _logprobs(answer))
        if self._opening.usage_in_stream:
            last += _event(self._frame | {"choices": [], "usage": _usage(answer)})
        return last + b"data: [DONE]\n\n"

    def keep_alive(self) -> bytes:
        return b": keep-alive\n\n"

    def error(self, refusal: Refusal) -> bytes:
        return _event(OpenAIChat().error(refusal)[1])

    def _chunk(self, delta: dict[str, Any], finish: str | None = None, logprobs: dict[str, Any] | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        return _event(self._frame | {"choices": [choice]})


def _event(document: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def _frame(opening: Opening, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{opening.id}", "object": kind, "created": opening.created, "model": opening.model}


def _usage(answer: Answer) -> dict[str, Any]:
    prompt, completion = answer.opening.prompt_tokens, answer.completion_tokens
    counts = {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
    return counts | {"completion_tokens_details": {"reasoning_tokens": answer.reasoning_tokens}}


def _logprobs(answer: Answer) -> dict[str, Any] | None:
    """The sampled tokens' own, of which alone all engines tell; a stream has all of them at its end."""
    if answer.logprobs is None:
        return None
    alone: dict[str, Any] = {"bytes": None, "top_logprobs": []}
    told = ((text, value if math.isfinite(value) else None) for text, value in answer.logprobs)
    return {"content": [{"token": text, "logprob": value} | alone for text, value in told], "refusal": None}


def _message(message: dict[str, Any], where: str) -> Message:
    role = message.get("role")
    if role == "user":
        return {"role": "user", **spoken(message.get("content"), f"{where}.content", _image)}
    if role == "tool":
        said = spoken(message.get("content"), f"{where}.content", _image)
        return {"role": "tool", **said, "tool_call_id": field(message, "tool_call_id", str, "")}
    content = joined_text(message.get("content"), f"{where}.content", text_block)
    if role in ("system", "developer"):
        return {"role": "system", "content": content}
    if role != "assistant":
        raise Refusal("bad_request", f"{where}.role: {role!r} is not a role")
    for name in ("function_call", "audio"):
        if message.get(name) is not None:
            raise Refusal("unsupported", f"{where}.{name} is not supported: calls are in tool_calls, answers are text")
    answer: Message = {"role": "assistant", "content": content}
    if reasoning := field(message, "reasoning_content", str) or field(message, "reasoning", str):
        answer["reasoning_content"] = reasoning
    if calls := objects(message, "tool_calls"):
        answer["tool_calls"] = [_call(call, f"{where}.tool_calls.{at}") for at, call in enumerate(calls)]
    return answer


def _image(block: dict[str, Any]) -> str | None:
    return needed(needed(block, "image_url", dict), "url", str) if block.get("type") == "image_url" else None


def _call(call: dict[str, Any], where: str) -> dict[str, Any]:
    if call.get("type", "function") != "function":
        raise Refusal("unsupported", f"{where}: calls of type {call['type']!r} are not supported")
    function = needed(call, "function", dict)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        arguments = json.dumps({} if arguments is None else arguments, ensure_ascii=False)
    if not isinstance(function.get("name"), str):
        raise Refusal("bad_request", f"{where}.function.name: field is required")
    named = {"name": function["name"], "arguments": arguments}
    return {"id": field(call, "id", str, ""), "type": "function", "function": named}


def _tool(tool: dict[str, Any], where: str) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise Refusal("unsupported", f"{where}: tools of type {tool.get('type')!r} are not supported")
    function = needed(tool, "function", dict, where)
    name = needed(function, "name", str, f"{where}.function")
    return function_tool(name, function.get("description"), function.get("parameters"), where)


def _tool_choice(choice: Any, tools: list[dict[str, Any]]) -> tuple[Any, list[dict[str, Any]]]:
    """The choice, and the tools that it leaves."""
    if isinstance(choice, str):
        if choice not in ("auto", "none", "required"):
            raise Refusal("bad_request", f"tool_choice: {choice!r} is not a choice")
        return choice, tools
    kind = choice.get("type")
    if kind == "function":
        return {"name": needed(needed(choice, "function", dict), "name", str)}, tools
    if kind != "allowed_tools":
        raise Refusal("unsupported", f"tool_choice: {kind!r} is not supported: choose a function")
    allowed = needed(choice, "allowed_tools", dict)
    names = {field(field(tool, "function", dict, {}), "name", str) for tool in objects(allowed, "tools")}
    left = [tool for tool in tools if tool["function"]["name"] in names]
    return _tool_choice(field(allowed, "mode", str, "auto"), left)
