"""What an OpenAI Responses request says: its items as messages, its tools as functions.

The items of one answer (reasoning, text, calls) become the one message that they were; their ids say whose they are. A
custom tool is a function with one string `input` to the model, and a tool of a namespace has the namespace before its
name. What only the provider could run or look up is refused by name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from polar.proxy.canonical import (
    Message,
    Refusal,
    field,
    function_tool,
    joined_text,
    needed,
    objects,
    spoken,
    text_block,
    unsealed,
)

Item = dict[str, Any]
WEB_SEARCH = ("web_search", "web_search_preview")
"""tools of the provider that Codex offers unasked"""
_ANSWERS = ("reasoning", "function_call", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_INPUT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
_OURS = re.compile(r"[a-z]+_([0-9a-f]{24})_\d+")
ODD = "odd"
"""kind of the id of a custom tool's call whose arguments were not {"input": text}: its input is those arguments"""


class Tool(msgspec.Struct, frozen=True):
    """What the API calls a tool that the model knows as a function."""

    name: str
    namespace: str | None
    custom: bool


def item_id(kind: str, answer: str, at: int) -> str:
    return f"{kind}_{answer}_{at}"


def read_items(value: Any) -> list[Item]:
    """The items of an input; text is a user's message."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    items = objects({"input": value}, "input")
    if not items:
        raise Refusal("bad_request", "input: at least one item is required")
    return [{"type": "message", **item} if item.get("type") is None else item for item in items]


def read_tools(tools: Sequence[Item], where: str, group: Item | None = None) -> Iterator[tuple[dict[str, Any], Tool]]:
    """Functions for the model, and what the API calls them. `group`: the namespace that they are in.

    A provider's web search is offered to no model here, and the answer's `tools` is without it.
    """
    for at, tool in enumerate(tools):
        kind = tool.get("type")
        if kind == "namespace" and group is None:
            yield from read_tools(objects(tool, "tools"), f"{where}.{at}.tools", tool)
        elif kind in ("function", "custom"):
            namespace = needed(group, "name", str, where.removesuffix(".tools")) if group else None
            known = Tool(needed(tool, "name", str, f"{where}.{at}"), namespace, custom=kind == "custom")
            said = [field(group or {}, "description", str, ""), field(tool, "description", str, "")]
            said += [_grammar(tool)] if known.custom else []
            parameters = _INPUT if known.custom else tool.get("parameters")
            name, about = _joined(namespace, known.name), "\n".join(filter(None, said))
            yield function_tool(name, about, parameters, f"{where}.{at}"), known
        elif kind not in WEB_SEARCH:
            raise Refusal("unsupported", f"{where}.{at}: no tool of type {kind!r} can be run here")


def read_choice(choice: Any, tools: dict[str, Tool]) -> tuple[Any, set[str]]:
    """The choice in canonical words, and the names of the tools that it leaves."""
    names = set(tools)
    if isinstance(choice, str) and choice in ("auto", "none", "required"):
        return choice, names
    if isinstance(choice, str):
        raise Refusal("bad_request", f"tool_choice: {choice!r} is not a choice")
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"name": _joined(field(choice, "namespace", str), needed(choice, "name", str))}, names
    if kind != "allowed_tools":
        raise Refusal("unsupported", f"tool_choice: {kind!r} is not supported: choose functions and custom tools")
    allowed = {field(tool, "name", str, "") for tool in objects(choice, "tools")}
    left = {name for name, tool in tools.items() if {name, tool.name, tool.namespace} & allowed}
    return read_choice(field(choice, "mode", str, "auto"), {name: tools[name] for name in left})


def read_messages(items: Sequence[Item]) -> list[Message]:
    messages: list[Message] = []
    turn: _Turn | None = None
    for at, item in enumerate(items):
        where = f"input.{at}"
        if item["type"] in _ANSWERS or (item["type"] == "message" and item.get("role") == "assistant"):
            found = _OURS.fullmatch(field(item, "id", str, ""))
            answer = found[1] if found else None
            if turn is None or not turn.takes(item, answer):
                messages += [] if turn is None or turn.cut_off else [turn.message()]
                turn = _Turn(answer)
            turn.add(item, where)
            continue
        messages += [] if turn is None else [turn.message()]
        messages += _others(item, where)
        turn = None
    return messages + ([] if turn is None or turn.cut_off else [turn.message()])


class _Turn:
    """The items of one answer, in order. `answer`: whose they are, where ids say so."""

    def __init__(self, answer: str | None) -> None:
        self.answer = answer
        self._ids: set[str] = set()
        self.thoughts: list[str] = []
        self.texts: list[str] = []
        self.calls: list[dict[str, Any]] = []

    @property
    def cut_off(self) -> bool:
        """Reasoning of ours without what followed it: where a stream breaks, Codex keeps that and asks once more."""
        return self.answer is not None and not self.texts and not self.calls

    def takes(self, item: Item, answer: str | None) -> bool:
        if answer is not None and self.answer is not None:
            return answer == self.answer
        return item["type"].endswith("_call") or not (self.texts or self.calls)

    def add(self, item: Item, where: str) -> None:
        name = field(item, "id", str, "")
        if name in self._ids:
            return  # who joined a call has the start of its stream twice
        self._ids |= {name} if name else set()
        if item["type"] == "message":
            self.texts.append(joined_text(item.get("content"), f"{where}.content", text_block))
        elif item["type"] == "reasoning":
            self.thoughts.append(_reasoning(item))
        else:
            self.calls.append(_call(item))

    def message(self) -> Message:
        thoughts = "\n".join(filter(None, self.thoughts))
        message: Message = {"role": "assistant", "content": "".join(self.texts)}
        message |= {"reasoning_content": thoughts} if thoughts else {}
        return message | ({"tool_calls": self.calls} if self.calls else {})


def _others(item: Item, where: str) -> list[Message]:
    kind, role = item["type"], item.get("role")
    if kind == "message" and role == "user":
        return [{"role": "user", **spoken(item.get("content"), f"{where}.content", _image)}]
    if kind == "message" and role in ("system", "developer"):
        return [{"role": "system", "content": joined_text(item.get("content"), f"{where}.content", text_block)}]
    if kind in _OUTPUTS:
        output = spoken(item.get("output"), f"{where}.output", _image)
        return [{"role": "tool", **output, "tool_call_id": needed(item, "call_id", str)}]
    if kind == "additional_tools":
        return []  # they stand with the others
    if kind == "message":
        raise Refusal("bad_request", f"{where}.role: {role!r} is not a role")
    raise Refusal("unsupported", f"{where}: items of type {kind!r} are not supported")


def _image(block: Item) -> str | None:
    if block.get("type") != "input_image":
        return None
    if block.get("file_id") is not None:
        raise Refusal("unsupported", "input_image: no file is stored: send image_url")
    return str(needed(block, "image_url", str))


def _call(item: Item) -> dict[str, Any]:
    if item["type"] == "function_call":
        arguments = field(item, "arguments", str, "")
    else:
        said = field(item, "input", str, "")
        odd = field(item, "id", str, "").startswith(f"{ODD}_")
        arguments = said if odd else json.dumps({"input": said}, ensure_ascii=False)
    function = {"name": _joined(field(item, "namespace", str), needed(item, "name", str)), "arguments": arguments}
    return {"id": needed(item, "call_id", str), "type": "function", "function": function}


def _reasoning(item: Item) -> str:
    """What we sealed, else what the item says."""
    if ours := unsealed(field(item, "encrypted_content", str, "")):
        return ours
    parts = objects(item, "content") or objects(item, "summary")
    return "\n".join(field(part, "text", str, "") for part in parts)


def _grammar(tool: Item) -> str:
    form = field(tool, "format", dict, {})
    if form.get("type", "text") == "text":
        return ""
    return f"The input follows this {field(form, 'syntax', str, '')} grammar:\n{field(form, 'definition', str, '')}"


def _joined(namespace: str | None, name: str) -> str:
    return name if not namespace else f"{namespace}__{name}"
