"""How families of models write tool calls: one class each, one line in a table, told apart by what a template says.

A call is taken where it is whole, and only there; one to a tool that nobody offered is a call all the same where its
markup leaves no doubt, since what to say to it is the harness's business (case 30).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from polar.proxy.rendering.harmony import Harmony
from polar.proxy.rendering.parsing import (
    CallForm,
    Format,
    Found,
    Markup,
    call_of,
    json_at,
)

CALL, END_CALL = "<tool_call>", "</tool_call>"


class Hermes(Markup):
    """One JSON object between <tool_call> and </tool_call>."""

    signs = (CALL,)
    opens = (CALL,)
    markers = (CALL, END_CALL)
    call_form = CallForm(f'{CALL}\n{{"name": "', '", "arguments": ', f"}}\n{END_CALL}")

    def found(self, text: str, tools: list[dict[str, Any]]) -> Iterator[Found]:
        at = 0
        while (start := text.find(CALL, at)) >= 0:
            read = json_at(text, start + len(CALL))
            call = _named(read[0], "arguments") if read is not None and text.startswith(END_CALL, read[1]) else None
            at = read[1] + len(END_CALL) if read is not None and call else start + len(CALL)
            yield start, at, call


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)
_FUNCTION = re.compile(r"(?:<tool_call>\s*)?<function=([^>\n]+)>")
_END_FUNCTION = re.compile(r"\s*</function>(?:\s*</tool_call>)?")


class Coder(Markup):
    """<function=NAME><parameter=NAME>VALUE</parameter>…</function>, mostly inside <tool_call>. Values are bare text:
    the tool's schema says which of them are JSON."""

    signs = ("<function=",)
    opens = (CALL, "<function=")
    markers = (CALL, END_CALL)

    def found(self, text: str, tools: list[dict[str, Any]]) -> Iterator[Found]:
        at, last = 0, text.rfind("</function>")
        while (head := _FUNCTION.search(text, at)) and head.start() < last:
            at, given = head.end(), {}
            while parameter := _PARAMETER.match(text, at):
                given[parameter[1].strip()] = _without_breaks(parameter[2])
                at = parameter.end()
            end = _END_FUNCTION.match(text, at)
            name = head[1].strip()
            call = call_of(name, _typed(given, name, tools)) if end else None
            at = end.end() if end and call else head.end()
            yield head.start(), at, call


_BEGIN = re.compile(r"(?:<｜tool▁calls▁begin｜>\s*)?<｜tool▁call▁begin｜>([^<\n]*)<｜tool▁sep｜>")
_FENCED = re.compile(r"([^<\n]+)\n```json\n")
_END = re.compile(r"\s*(?:```\s*)?<｜tool▁call▁end｜>(?:\s*<｜tool▁calls▁end｜>)?")


class DeepSeek(Markup):
    """Calls in tokens of their own, the arguments bare, or fenced behind the name, which then follows the separator."""

    signs = ("<｜tool▁calls▁begin｜>",)
    opens = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    markers = (
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
    )
    call_form = CallForm(
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    )

    def found(self, text: str, tools: list[dict[str, Any]]) -> Iterator[Found]:
        at = 0
        while head := _BEGIN.search(text, at):
            fenced = _FENCED.match(text, head.end())
            name = (fenced or head)[1].strip()
            read = json_at(text, fenced.end() if fenced else head.end())
            end = _END.match(text, read[1]) if read is not None else None
            call = call_of(name, read[0]) if read is not None and end and isinstance(read[0], dict) else None
            at = end.end() if end and call else head.end()
            yield head.start(), at, call


TAG = "<|python_tag|>"


class Llama(Markup):
    """One JSON object with name and parameters: behind <|python_tag|>, or bare and then the whole answer, which is a
    call only where it names a tool that was offered. Templates of this family refuse a turn with several calls, so an
    answer with several is text."""

    signs = (TAG, '"parameters": ')
    opens = (TAG,)
    markers = (TAG,)
    opens_alone = ("{",)
    call_form = CallForm('{"name": "', '", "parameters": ', "}")
    ends = ("<|eom_id|>", "<|eot_id|>")

    def found(self, text: str, tools: list[dict[str, Any]]) -> Iterator[Found]:
        start = text.find(TAG)
        read = json_at(text, start + len(TAG) if start >= 0 else 0)
        if read is None or read[1] < len(text):
            return
        call = _named(read[0], "parameters", "arguments")
        offered = {tool["function"]["name"] for tool in tools}
        if call and (start >= 0 or call["function"]["name"] in offered):
            yield max(start, 0), len(text), call


FORMATS: tuple[Format, ...] = (Harmony(), Coder(), DeepSeek(), Hermes(), Llama())
DEFAULT = Hermes()


def format_of(template: str, vocabulary: Collection[str] = ()) -> Format:
    """The format that the template writes; where it writes no calls, the one whose tokens the vocabulary has."""
    told = (form for form in FORMATS if any(sign in template for sign in form.signs))
    known = (form for form in FORMATS if any(sign in vocabulary for sign in form.signs))
    return next(told, None) or next(known, DEFAULT)


def _named(value: Any, *names: str) -> dict[str, Any] | None:
    if not isinstance(value, dict):
        return None
    return call_of(value.get("name"), next((value[name] for name in names if name in value), {}))


def _typed(given: dict[str, str], name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    schemas = [tool["function"].get("parameters") for tool in tools if tool["function"]["name"] == name]
    properties = schemas[0].get("properties") if schemas and isinstance(schemas[0], dict) else None
    known = properties if isinstance(properties, dict) else {}
    return {key: _value(text, known.get(key)) for key, text in given.items()}


def _value(text: str, schema: Any) -> Any:
    """The JSON value where the schema takes no string and there is one; else the text."""
    kinds = schema.get("type") if isinstance(schema, dict) else None
    if not isinstance(kinds, str | list) or "string" in kinds:
        return text
    if text.strip() in ("True", "False"):
        return text.strip() == "True"
    read = json_at(text, 0)
    return read[0] if read is not None and read[1] == len(text) else text


def _without_breaks(text: str) -> str:
    return text.removeprefix("\n").removesuffix("\n")
