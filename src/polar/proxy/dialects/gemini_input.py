"""What a Gemini request says: contents as messages, declarations as tools, settings under their canonical names.

Field names are taken in both of Google's spellings, as its own SDKs mix them. What they leave out on the way back
(thoughts, ids of calls and of results) changes no conversation: a thought comes back in the signature of the call
behind it, an id by order and name. What only Google could run or look up is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from typing import Any

from polar.proxy.canonical import (
    Kind,
    Message,
    Refusal,
    data_url,
    field,
    function_tool,
    needed,
    objects,
    picked,
    refuse,
    spoken,
    unsealed,
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
_REFUSED = {
    "responseFormat": "it is not supported: send responseMimeType and responseJsonSchema",
    "responseLogprobs": "no logprobs are told",
    "logprobs": "no logprobs are told",
}
_CHOICES = {"MODE_UNSPECIFIED": "auto", "AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}


class History:
    """Contents to messages. Contents of the model in a row are one answer: SDKs keep a stream's events as they came."""

    def __init__(self, contents: list[dict[str, Any]]) -> None:
        self.messages: list[Message] = []
        self._open: list[dict[str, Any]] = []
        """calls without a result so far"""
        self._made = 0
        for at, content in enumerate(contents):
            parts = [named(part) for part in several(content, "parts")]
            self._take(content.get("role") or "user", parts, f"contents.{at}")
        if not self.messages:
            missing = "contents.0.parts: at least one part" if contents else "contents: at least one content"
            raise Refusal("bad_request", f"{missing} is required")

    def _take(self, role: Any, parts: list[dict[str, Any]], where: str) -> None:
        if role == "model":
            self._answer(parts, where)
        elif role in ("user", "function"):
            self._say(parts, where)
        else:
            raise Refusal("bad_request", f"{where}.role: {role!r} is not a role")

    def _say(self, parts: list[dict[str, Any]], where: str) -> None:
        """Results are messages of their own in the canonical form; the text between them is the user's."""
        for results, group in groupby(parts, key=lambda part: part.get("functionResponse") is not None):
            if results:
                self.messages += [self._result(named(needed(part, "functionResponse", dict)), where) for part in group]
            else:
                said = spoken(list(group), f"{where}.parts", _image, _text)
                self.messages.append({"role": "user", **said})

    def _result(self, response: dict[str, Any], where: str) -> Message:
        given, name = field(response, "id", str, ""), needed(response, "name", str)
        same = [call for call in self._open if call["id"] == given]
        same += [call for call in self._open if call["function"]["name"] == name]
        if same:
            self._open.remove(same[0])
        number = same[0]["id"] if same else given or self._next_id()
        output = _output(field(response, "response", dict, {}))
        shown = [{"text": output}] if output else []
        said = spoken([*shown, *map(named, objects(response, "parts"))], where, _image, _text)
        return {"role": "tool", **said, "tool_call_id": number}

    def _answer(self, parts: list[dict[str, Any]], where: str) -> None:
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.messages.append({"role": "assistant", "content": ""})
            self._open = []
        message = self.messages[-1]
        for at, part in enumerate(parts):
            if (call := field(part, "functionCall", dict)) is not None:
                calls = message.setdefault("tool_calls", [])
                calls.append(self._call(named(call)))
                if reasoning := unsealed(field(part, "thoughtSignature", str, "")):
                    message.setdefault("reasoning_content", reasoning)
            elif part.get("thought"):
                message["reasoning_content"] = message.get("reasoning_content", "") + _text(part, f"{where}.parts.{at}")
            else:
                message["content"] += _text(part, f"{where}.parts.{at}")

    def _call(self, call: dict[str, Any]) -> dict[str, Any]:
        arguments = json.dumps(field(call, "args", dict, {}), ensure_ascii=False)
        function = {"name": needed(call, "name", str), "arguments": arguments}
        made = {"id": field(call, "id", str) or self._next_id(), "type": "function", "function": function}
        self._open.append(made)
        return made

    def _next_id(self) -> str:
        self._made += 1
        return f"unnamed_{self._made}"


def named(message: Mapping[str, Any]) -> dict[str, Any]:
    """With field names in lower camel case; clients may write them with underscores as well."""
    return {re.sub("_([a-z])", lambda found: found[1].upper(), name): value for name, value in message.items()}


def several(body: Mapping[str, Any], name: str) -> list[dict[str, Any]]:
    """A list of objects, of which Google's own examples write a single one bare."""
    value = body.get(name)
    return [value] if isinstance(value, dict) else objects(body, name)


def _text(part: dict[str, Any], where: str) -> str:
    """Raises Refusal for a part that is something else; a part with a signature alone has none."""
    others = [name for name in part if name not in ("text", "thought", "thoughtSignature")]
    if "text" not in part and others:
        raise Refusal("unsupported", f"{where}: a part of type {others[0]!r} is not supported: this model takes text")
    return field(part, "text", str, "")


def _image(part: dict[str, Any]) -> str | None:
    if (blob := field(part, "inlineData", dict)) is None:
        return None
    blob = named(blob)
    return data_url(blob.get("mimeType"), blob.get("data"), "inlineData")


def _output(response: dict[str, Any]) -> str:
    """As Google reads it: `output` alone is what the function gave, any other object is all of it."""
    output = response["output"] if list(response) == ["output"] else response
    return output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)


def read_system(request: dict[str, Any]) -> list[Message]:
    parts = several(field(request, "systemInstruction", dict, {}), "parts")
    text = "\n".join(_text(named(part), f"systemInstruction.parts.{at}") for at, part in enumerate(parts))
    return [{"role": "system", "content": text}] if text else []


def read_sampling(config: dict[str, Any]) -> dict[str, Any]:
    if field(config, "candidateCount", int, 1) != 1:
        raise Refusal("unsupported", "candidateCount: one answer a request; send more requests instead")
    refuse(config, _REFUSED)
    if other := [form for form in field(config, "responseModalities", list, []) if form != "TEXT"]:
        raise Refusal("unsupported", f"responseModalities: {other[0]!r} is not supported: this model gives text")
    if isinstance(top := config.get("topK"), float) and top.is_integer():
        config["topK"] = int(top)
    return picked(config, _SAMPLING)


def read_form(config: dict[str, Any]) -> dict[str, Any] | None:
    """The schema of the answer's JSON; {} for any JSON, None for text."""
    schema = field(config, "responseJsonSchema", dict) or _schema(field(config, "responseSchema", dict))
    form = field(config, "responseMimeType", str, "text/plain")
    if form not in ("text/plain", "application/json"):
        raise Refusal("unsupported", f"responseMimeType: {form!r} is not supported")
    if form == "text/plain" and schema:
        raise Refusal("bad_request", "responseSchema: it needs the responseMimeType application/json")
    return None if form == "text/plain" else schema or {}


def read_tools(request: dict[str, Any]) -> list[dict[str, Any]]:
    declared: list[dict[str, Any]] = []
    for at, tool in enumerate(map(named, several(request, "tools"))):
        if others := [name for name, value in tool.items() if name != "functionDeclarations" and value is not None]:
            raise Refusal("unsupported", f"tools.{at}: {others[0]} is not supported")
        for number, declaration in enumerate(map(named, objects(tool, "functionDeclarations"))):
            schema = field(declaration, "parametersJsonSchema", dict) or _schema(declaration.get("parameters"))
            name = needed(declaration, "name", str, f"tools.{at}.functionDeclarations.{number}")
            declared.append(function_tool(name, declaration.get("description"), schema, f"tools.{at}"))
    return declared


def _schema(schema: Any) -> Any:
    """Google's schema as JSON schema: types in small letters, null as a type, lengths as numbers."""
    if isinstance(schema, list):
        return [_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    made = named(schema)
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


def read_choice(config: dict[str, Any]) -> tuple[Any, list[str]]:
    """The choice, and the names of the only tools that are offered; [] for all."""
    calling = named(field(config, "functionCallingConfig", dict, {}))
    mode = field(calling, "mode", str, "AUTO")
    if mode not in _CHOICES:
        raise Refusal("bad_request", f"toolConfig.functionCallingConfig.mode: {mode!r} is not a mode")
    allowed = field(calling, "allowedFunctionNames", list, [])
    if mode == "ANY" and len(allowed) == 1:
        return {"name": allowed[0]}, []
    return _CHOICES[mode], allowed
