"""Gemini generateContent: requests to the canonical form, answers back, whole and streamed to the same parts.

Field names are taken in both of Google's spellings. What its SDKs leave out on the way back (thoughts, ids of calls and
of results) changes no conversation: a thought comes back in the signature of the call behind it, an id by order and
name.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Mapping, Sequence
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
    field,
    function_tool,
    made_id,
    needed,
    objects,
    picked,
)

_NUMBER = (int, float)
_SAMPLING: dict[str, tuple[str, Kind]] = {
    "temperature": ("temperature", _NUMBER),
    "topP": ("top_p", _NUMBER),
    "topK": ("top_k", int),
    "maxOutputTokens": ("max_tokens", int),
    "stopSequences": ("stop", list),
    "seed": ("seed", int),
    "presencePenalty": ("presence_penalty", _NUMBER),
    "frequencyPenalty": ("frequency_penalty", _NUMBER),
}
# Google's clients ask again on 429 and 5xx: an engine that no retry of ours healed is none of these.
_STATUS = {
    "bad_request": (400, "INVALID_ARGUMENT"),
    "unsupported": (400, "INVALID_ARGUMENT"),
    "unauthorized": (401, "UNAUTHENTICATED"),
    "not_found": (404, "NOT_FOUND"),
    "context": (400, "INVALID_ARGUMENT"),
    "limit": (403, "PERMISSION_DENIED"),
    "busy": (429, "RESOURCE_EXHAUSTED"),
    "engine": (400, "FAILED_PRECONDITION"),
    "server": (500, "INTERNAL"),
}
_OVERFLOW = "The input token count exceeds the maximum number of tokens allowed: "
_CHOICES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
_METHODS = ["generateContent", "streamGenerateContent", "countTokens"]
_SIGNED = b"polar:"


class Gemini:
    """`sse` False: a stream is one JSON array whose elements come one by one."""

    name = "gemini"

    def __init__(self, *, sse: bool) -> None:
        self._sse = sse
        self.stream_type = SSE if sse else "application/json; charset=utf-8"

    def parse(self, body: dict[str, Any], path: str) -> Ask:
        found = re.search(r"/models/(.+):(\w+)", path)
        assert found is not None, "the route names a model and a method"
        request = _named(body)
        request = _named(field(request, "generateContentRequest", dict, request))
        if field(request, "cachedContent", str):
            raise Refusal("unsupported", "cachedContent is not supported: send the contents themselves")
        config = _named(field(request, "generationConfig", dict, {}))
        choice, allowed = _tool_choice(_named(field(request, "toolConfig", dict, {})))
        return Ask(
            model=found[1],
            messages=[*_system(request), *_History(objects(request, "contents")).messages],
            tools=[tool for tool in _tools(request) if tool["function"]["name"] in allowed or not allowed] or None,
            tool_choice=choice,
            sampling=_sampling(config),
            stream=found[2] == "streamGenerateContent",
            reasoning_shown=bool(_named(field(config, "thinkingConfig", dict, {})).get("includeThoughts")),
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        message, reasoning = answer.message, answer.message.get("reasoning_content") or ""
        parts = [_thought(reasoning)] if reasoning and answer.opening.reasoning_shown else []
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
            shown = self._opening.reasoning_shown
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


class _History:
    """Contents to messages. Contents of the model in a row are one answer: SDKs keep a stream's events as they came."""

    def __init__(self, contents: list[dict[str, Any]]) -> None:
        self.messages: list[Message] = []
        self._open: list[dict[str, Any]] = []
        """calls without a result so far"""
        self._made = 0
        for at, content in enumerate(contents):
            parts = [_named(part) for part in objects(content, "parts")]
            self._take(content.get("role") or "user", parts, f"contents.{at}")
        if not self.messages:
            raise Refusal("bad_request", "contents: at least one content is required")

    def _take(self, role: Any, parts: list[dict[str, Any]], where: str) -> None:
        if role == "model":
            self._answer(parts, where)
        elif role in ("user", "function"):
            self._say(parts, where)
        else:
            raise Refusal("bad_request", f"{where}.role: {role!r} is not a role")

    def _say(self, parts: list[dict[str, Any]], where: str) -> None:
        """Results are messages of their own in the canonical form; the text between them is the user's."""
        texts: list[Message] = []
        for part in parts:
            if response := field(part, "functionResponse", dict):
                self.messages.append(self._result(_named(response)))
                texts = []
            elif not texts:
                texts = [{"role": "user", "content": _text(part, where)}]
                self.messages += texts
            else:
                texts[0]["content"] += "\n" + _text(part, where)

    def _result(self, response: dict[str, Any]) -> Message:
        if response.get("parts"):
            raise Refusal("unsupported", "functionResponse.parts are not supported: this model takes text")
        given, name = field(response, "id", str, ""), needed(response, "name", str)
        same = [call for call in self._open if call["id"] == given]
        same += [call for call in self._open if call["function"]["name"] == name]
        if same:
            self._open.remove(same[0])
        number = same[0]["id"] if same else given or self._next_id()
        return {"role": "tool", "content": _output(field(response, "response", dict, {})), "tool_call_id": number}

    def _answer(self, parts: list[dict[str, Any]], where: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open = []
        message = self.messages[-1]
        for part in parts:
            if call := field(part, "functionCall", dict):
                calls = message.setdefault("tool_calls", [])
                calls.append(self._call(_named(call)))
                if reasoning := _reasoning(part):
                    message.setdefault("reasoning_content", reasoning)
            elif part.get("thought"):
                message["reasoning_content"] = message.get("reasoning_content", "") + _text(part, where)
            else:
                message["content"] += _text(part, where)

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(field(call, "args", dict, {}), ensure_ascii=False)
        function = {"name": needed(call, "name", str), "arguments": arguments}
        made = {"id": field(call, "id", str) or self._next_id(), "type": "function", "function": function}
        self._open.append(made)
        return made

    def _next_id(self) -> str:
        self._made += 1
        return made_id(self._made)


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
        prompt, sampled = opening.prompt_tokens, answer.completion_tokens
        counts = {"promptTokenCount": prompt, "candidatesTokenCount": sampled, "totalTokenCount": prompt + sampled}
        response["usageMetadata"] = counts
    return response


def _thought(text: str) -> dict[str, Any]:
    return {"text": text, "thought": True}


def _function_call(call: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """`reasoning`: what was thought before the call; clients that show no thoughts give it back with the call."""
    asked = {"id": call["id"], "name": call["function"]["name"], "args": argument_object(call)}
    signature = base64.b64encode(_SIGNED + reasoning.encode(errors="replace")).decode()
    return {"functionCall": asked} | ({"thoughtSignature": signature} if reasoning else {})


def _reasoning(part: dict[str, Any]) -> str:
    """The thought in a signature of ours; "" for any other signature. SDKs change its alphabet."""
    signature = field(part, "thoughtSignature", str, "").replace("-", "+").replace("_", "/")
    try:
        data = base64.b64decode(signature + "=" * (-len(signature) % 4))
    except (binascii.Error, ValueError):
        return ""
    return data.removeprefix(_SIGNED).decode(errors="replace") if data.startswith(_SIGNED) else ""


def _named(message: Mapping[str, Any]) -> dict[str, Any]:
    """With field names in lower camel case; clients may write them with underscores as well."""
    return {re.sub("_([a-z])", lambda found: found[1].upper(), name): value for name, value in message.items()}


def _text(part: dict[str, Any], where: str) -> str:
    """Raises Refusal for a part that is something else; a part with a signature alone has none."""
    others = [name for name in part if name not in ("text", "thought", "thoughtSignature")]
    if "text" not in part and others:
        raise Refusal("unsupported", f"{where}: a part of type {others[0]!r} is not supported: this model takes text")
    return field(part, "text", str, "")


def _output(response: dict[str, Any]) -> str:
    """As Google reads it: `output` alone is what the function gave, any other object is all of it."""
    output = response["output"] if list(response) == ["output"] else response
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def _system(request: dict[str, Any]) -> list[Message]:
    parts = objects(field(request, "systemInstruction", dict, {}), "parts")
    text = "\n".join(_text(_named(part), "systemInstruction") for part in parts)
    return [{"role": "system", "content": text}] if text else []


def _sampling(config: dict[str, Any]) -> dict[str, Any]:
    if field(config, "candidateCount", int, 1) != 1:
        raise Refusal("unsupported", "candidateCount: one answer a request; send more requests instead")
    if (form := field(config, "responseMimeType", str, "text/plain")) != "text/plain":
        raise Refusal("unsupported", f"responseMimeType: {form!r} is not supported")
    for name in ("responseSchema", "responseJsonSchema", "responseFormat"):
        if config.get(name) is not None:
            raise Refusal("unsupported", f"{name} is not supported")
    if other := [form for form in field(config, "responseModalities", list, []) if form != "TEXT"]:
        raise Refusal("unsupported", f"responseModalities: {other[0]!r} is not supported: this model gives text")
    if isinstance(top := config.get("topK"), float) and top.is_integer():
        config["topK"] = int(top)
    return picked(config, _SAMPLING)


def _tools(request: dict[str, Any]) -> list[dict[str, Any]]:
    declared: list[dict[str, Any]] = []
    for at, tool in enumerate(map(_named, objects(request, "tools"))):
        if others := [name for name, value in tool.items() if name != "functionDeclarations" and value is not None]:
            raise Refusal("unsupported", f"tools.{at}: {others[0]} is not supported")
        for declaration in map(_named, objects(tool, "functionDeclarations")):
            schema = field(declaration, "parametersJsonSchema", dict) or _schema(declaration.get("parameters"))
            declared.append(function_tool(needed(declaration, "name", str), declaration.get("description"), schema))
    return declared


def _schema(schema: Any) -> Any:
    """Google's schema as JSON schema: types in small letters, null as a type, lengths as numbers."""
    if isinstance(schema, list):
        return [_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = _named(schema)
    nullable = made.pop("nullable", False)
    made.pop("propertyOrdering", None)
    for name, value in made.items():
        if name == "type" and isinstance(value, str):
            made[name] = [value.lower(), "null"] if nullable else value.lower()
        elif name in ("items", "anyOf"):
            made[name] = _schema(value)
        elif name == "properties" and isinstance(value, dict):
            made[name] = {key: _schema(inner) for key, inner in value.items()}
        elif name[:3] in ("min", "max") and isinstance(value, str) and value.isdecimal():
            made[name] = int(value)
    return made


def _tool_choice(config: dict[str, Any]) -> tuple[Any, list[str]]:
    """The choice, and the names of the only tools that are offered; [] for all."""
    calling = _named(field(config, "functionCallingConfig", dict, {}))
    mode = field(calling, "mode", str, "AUTO")
    if mode not in _CHOICES:
        raise Refusal("bad_request", f"toolConfig.functionCallingConfig.mode: {mode!r} is not a mode")
    allowed = field(calling, "allowedFunctionNames", list, [])
    if mode == "ANY" and len(allowed) == 1:
        return {"name": allowed[0]}, []
    return _CHOICES[mode], allowed
