"""Gemini generateContent: requests to the canonical form, answers back, whole and streamed to the same parts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from polar.protocols import Delta
from polar.proxy.canonical import SSE, Answer, Ask, Opening, Refusal, argument_object, field, refuse, sealed
from polar.proxy.dialects.gemini_input import (
    History,
    named,
    read_choice,
    read_form,
    read_sampling,
    read_system,
    read_tools,
    several,
)

# Google's clients ask again on 429 and 5xx: an engine that no retry of ours healed is none of these.
_STATUS = {
    "bad_request": (400, "INVALID_ARGUMENT"),
    "unsupported": (400, "INVALID_ARGUMENT"),
    "too_large": (413, "INVALID_ARGUMENT"),
    "unauthorized": (401, "UNAUTHENTICATED"),
    "not_found": (404, "NOT_FOUND"),
    "context": (400, "INVALID_ARGUMENT"),
    "limit": (403, "PERMISSION_DENIED"),
    "busy": (429, "RESOURCE_EXHAUSTED"),
    "engine": (400, "FAILED_PRECONDITION"),
    "server": (500, "INTERNAL"),
}
_REFUSED = {
    "cachedContent": "nothing is kept: send the contents themselves",
    "continuationToken": "nothing is kept: send the contents so far",
}
_OVERFLOW = "The input token count exceeds the maximum number of tokens allowed: "
_METHODS = ["generateContent", "streamGenerateContent", "countTokens"]


class Gemini:
    """`sse` False: a stream is one JSON array whose elements come one by one."""

    name = "gemini"

    def __init__(self, *, sse: bool) -> None:
        self._sse = sse
        self.stream_type = SSE if sse else "application/json; charset=utf-8"

    def parse(self, body: dict[str, Any], path: str) -> Ask:
        found = re.search(r"/models/(.+):(\w+)", path)
        assert found is not None, "the route names a model and a method"
        request = named(body)
        request = named(field(request, "generateContentRequest", dict, request))
        refuse(request, _REFUSED)
        config = named(field(request, "generationConfig", dict, {}))
        choice, allowed = read_choice(named(field(request, "toolConfig", dict, {})))
        return Ask(
            model=found[1],
            messages=[*read_system(request), *History(several(request, "contents")).messages],
            tools=[tool for tool in read_tools(request) if tool["function"]["name"] in allowed or not allowed] or None,
            tool_choice=choice,
            json_schema=read_form(config),
            sampling=read_sampling(config),
            stream=found[2] == "streamGenerateContent",
            echo=bool(named(field(config, "thinkingConfig", dict, {})).get("includeThoughts")),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        message, reasoning = answer.message, answer.message.get("reasoning_content") or ""
        parts = [_thought(reasoning)] if reasoning and answer.opening.echo else []
        parts += [{"text": message["content"]}] if message["content"] else []
        for at, call in enumerate(message.get("tool_calls", [])):
            parts.append(_function_call(call, "" if at else reasoning))
        return _response(answer.opening, parts, answer)

    def encoder(self, opening: Opening) -> _Encoder:
        return _Encoder(opening) if self._sse else _ArrayEncoder(opening)

    def count(self, tokens: int) -> dict[str, Any]:
        return {"totalTokens": tokens}

    def models(self, names: Sequence[str], created: int) -> dict[str, Any]:
        return {"models": [self.model(name, created) for name in names]}

    def model(self, name: str, created: int) -> dict[str, Any]:
        return {"name": f"models/{name}", "displayName": name, "supportedGenerationMethods": _METHODS}

    def error(self, refusal: Refusal) -> tuple[int, dict[str, Any]]:
        return _error(refusal)


class _Encoder:
    """Events that each hold parts; the last one holds the finish reason, and a text, as SDKs drop turns without one."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._reasoning = ""

    def start(self) -> bytes:
        return b""

    def delta(self, delta: Delta) -> bytes:
        if delta.kind == "text":
            return self._event(_response(self._opening, [{"text": delta.text}]))
        if delta.kind == "reasoning":
            self._reasoning += delta.text
            shown = self._opening.echo
            return self._event(_response(self._opening, [_thought(delta.text)])) if shown else b""
        reasoning, self._reasoning = self._reasoning, ""
        return self._event(_response(self._opening, [_function_call(delta.call or {}, reasoning)]))

    def end(self, answer: Answer) -> bytes:
        return self._event(_response(answer.opening, [], answer))

    def keep_alive(self) -> bytes:
        """Not a comment: its JavaScript SDK takes nothing but white space and data."""
        return b"\n"

    def error(self, refusal: Refusal) -> bytes:
        """Bare JSON: what its SDKs take for an error between events."""
        return _json(_error(refusal)[1]) + b"\n\n"

    def _event(self, document: dict[str, Any]) -> bytes:
        return b"data: " + _json(document) + b"\n\n"


class _ArrayEncoder(_Encoder):
    def __init__(self, opening: Opening) -> None:
        super().__init__(opening)
        self._before = b"["

    def end(self, answer: Answer) -> bytes:
        return super().end(answer) + b"]"

    def error(self, refusal: Refusal) -> bytes:
        return self._event(_error(refusal)[1]) + b"]"

    def _event(self, document: dict[str, Any]) -> bytes:
        before, self._before = self._before, b",\n"
        return before + _json(document)


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, ensure_ascii=False, separators=(",", ":")).encode()


def _error(refusal: Refusal) -> tuple[int, dict[str, Any]]:
    code, status = _STATUS[refusal.kind]
    message = _OVERFLOW + refusal.message if refusal.kind == "context" else refusal.message
    return code, {"error": {"code": code, "message": message, "status": status}}


def _response(opening: Opening, parts: list[dict[str, Any]], answer: Answer | None = None) -> dict[str, Any]:
    candidate: dict[str, Any] = {"content": {"parts": parts or [{"text": ""}], "role": "model"}, "index": 0}
    response: dict[str, Any] = {"candidates": [candidate], "modelVersion": opening.model, "responseId": opening.id}
    if answer is not None:
        candidate["finishReason"] = "MAX_TOKENS" if answer.finish_reason == "length" else "STOP"
        response["usageMetadata"] = _usage(answer)
    return response


def _usage(answer: Answer) -> dict[str, int]:
    """What was thought does not count as the candidate's."""
    prompt, sampled, thought = answer.opening.prompt_tokens, answer.completion_tokens, answer.reasoning_tokens
    counts = {"promptTokenCount": prompt, "candidatesTokenCount": sampled - thought}
    return counts | ({"thoughtsTokenCount": thought} if thought else {}) | {"totalTokenCount": prompt + sampled}


def _thought(text: str) -> dict[str, Any]:
    return {"text": text, "thought": True}


def _function_call(call: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """`reasoning`: what was thought before the call; clients that show no thoughts give it back with the call."""
    asked = {"id": call["id"], "name": call["function"]["name"], "args": argument_object(call)}
    return {"functionCall": asked} | ({"thoughtSignature": sealed(reasoning)} if reasoning else {})
