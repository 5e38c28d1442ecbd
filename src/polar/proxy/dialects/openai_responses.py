"""OpenAI Responses: requests to the canonical form, answers back, whole and streamed to the same output items.

All of a conversation is in the input: nothing is kept between requests, and what would need it is refused by name.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import msgspec

from polar.protocols import Delta
from polar.proxy.canonical import (
    Answer,
    Ask,
    Kind,
    Message,
    Opening,
    Refusal,
    field,
    json_form,
    needed,
    number_too_large,
    objects,
    picked,
    refuse,
    sealed,
    whole_characters,
)
from polar.proxy.dialects.openai_chat import OpenAI
from polar.proxy.dialects.openai_input import (
    ODD,
    WEB_SEARCH,
    Item,
    Tool,
    item_id,
    read_choice,
    read_items,
    read_messages,
    read_tools,
)

_NUMBER = (int, float)
_SAMPLING: dict[str, tuple[str, Kind]] = {
    "temperature": ("temperature", _NUMBER),
    "top_p": ("top_p", _NUMBER),
    "max_output_tokens": ("max_tokens", int),
}
_NO_LOGPROBS = "they are told by chat completions alone"
_REFUSED = {
    "previous_response_id": "no response is kept: send the whole conversation as input",
    "conversation": "no conversation is kept: send all of it as input",
    "background": "no response is kept: wait for it, or have it streamed",
    "prompt": "no prompt is stored: send its text as instructions and input",
    "top_logprobs": _NO_LOGPROBS,
}
_REPEATED = ("instructions", "max_output_tokens", "prompt_cache_key", "reasoning", "temperature", "top_p", "user")
_KINDS = {"text": "msg", "reasoning": "rs"}


class _Echo(msgspec.Struct, kw_only=True):
    """What an answer repeats of its request; `tools` by the names that the model knows."""

    fields: dict[str, Any]
    tools: dict[str, Tool]
    seals: bool


class OpenAIResponses(OpenAI):
    name = "openai_responses"

    def parse(self, body: dict[str, Any], path: str) -> Ask:
        _check(body)
        items = read_items(needed(body, "input", (str, list)))
        more = [tool for item in items if item["type"] == "additional_tools" for tool in objects(item, "tools")]
        offered = [*objects(body, "tools"), *more]
        functions = {function["function"]["name"]: (function, tool) for function, tool in read_tools(offered, "tools")}
        tools = {name: tool for name, (_, tool) in functions.items()}
        choice, left = read_choice(field(body, "tool_choice", (str, dict), "auto"), tools)
        instructions = field(body, "instructions", str, "")
        head: list[Message] = [{"role": "system", "content": instructions}] if instructions else []
        echo = _Echo(
            fields=_fields(body, offered),
            tools=tools,
            seals="reasoning.encrypted_content" in field(body, "include", list, []),
        )
        form = field(field(body, "text", dict, {}), "format", dict, {})
        return Ask(
            model=field(body, "model", str, "") if path.endswith("/input_tokens") else needed(body, "model", str),
            messages=head + read_messages(items),
            tools=[function for name, (function, _) in functions.items() if name in left] or None,
            tool_choice=choice,
            parallel_calls=field(body, "parallel_tool_calls", bool, True),
            json_schema=json_form(form, "text.format", form.get("schema")),
            sampling=picked(body, _SAMPLING),
            stream=field(body, "stream", bool, False),
            echo=echo,
        )

    def whole(self, answer: Answer) -> dict[str, Any]:
        items = [_item(answer.opening, at, delta) for at, delta in enumerate(_deltas(answer.message))]
        if items[-1]["type"] == "message":
            items[-1]["status"] = _status(answer)
        return _finished(answer, items)

    def encoder(self, opening: Opening) -> _Encoder:
        return _Encoder(opening)


class _Encoder:
    """One item of text is open at a time, and grows while deltas of its kind come."""

    def __init__(self, opening: Opening) -> None:
        self._opening = opening
        self._sequence = 0
        self._done: list[Item] = []
        self._open: Literal["reasoning", "text"] | None = None
        self._said: list[str] = []

    def start(self) -> bytes:
        if self._sequence:
            return b""
        return self._lifecycle("created", "in_progress") + self._lifecycle("in_progress", "in_progress")

    def keep_alive(self) -> bytes:
        """Codex takes only events for a sign of life. This one is known to all clients, behind the start."""
        if self._sequence:
            return self._lifecycle("in_progress", "in_progress")
        return self.start() if self._opening.id else b": keep-alive\n\n"

    def delta(self, delta: Delta) -> bytes:
        if delta.kind == "tool_call":
            return self._close("completed") + self._call(delta)
        begun = b"" if self._open == delta.kind else self._begin(delta.kind)
        self._said.append(delta.text)
        return begun + self._text_event("delta", delta=delta.text)

    def end(self, answer: Answer) -> bytes:
        said = self._open == "text" or any(item["type"] != "reasoning" for item in self._done)
        data = b"" if said else self.delta(Delta(kind="text"))
        data += self._close(_status(answer))
        response = _finished(answer, self._done)
        return data + self._event(f"response.{response['status']}", response=response)

    def error(self, refusal: Refusal) -> bytes:
        code = "context_length_exceeded" if refusal.kind == "context" else "server_error"
        failure = {"code": code, "message": refusal.message}
        return self.start() + self._lifecycle("failed", "failed", output=self._done, error=failure)

    def _begin(self, kind: Literal["reasoning", "text"]) -> bytes:
        closed = self._close("completed")
        self._open, self._said = kind, []
        item = _item(self._opening, len(self._done), Delta(kind=kind))
        added = self._item_event("added", item | {"content": [], "status": "in_progress"})
        return closed + added + self._event("response.content_part.added", **self._place(), part=item["content"][0])

    def _close(self, status: str) -> bytes:
        if self._open is None:
            return b""
        said = Delta(kind=self._open, text="".join(self._said))
        item = _item(self._opening, len(self._done), said) | {"status": status}
        data = self._text_event("done", text=said.text)
        data += self._event("response.content_part.done", **self._place(), part=item["content"][0])
        return data + self._finish(item)

    def _call(self, delta: Delta) -> bytes:
        item = _item(self._opening, len(self._done), delta)
        custom = item["type"] == "custom_tool_call"
        name, kind = ("input", "custom_tool_call_input") if custom else ("arguments", "function_call_arguments")
        place = {"item_id": item["id"], "output_index": len(self._done)}
        data = self._item_event("added", item | {name: "", "status": "in_progress"})
        data += self._event(f"response.{kind}.delta", **place, delta=item[name])
        data += self._event(f"response.{kind}.done", **place, **{name: item[name]})
        return data + self._finish(item)

    def _finish(self, item: Item) -> bytes:
        data = self._item_event("done", item)
        self._done.append(item)
        self._open = None
        return data

    def _place(self) -> dict[str, Any]:
        assert self._open is not None
        name = item_id(_KINDS[self._open], self._opening.id, len(self._done))
        return {"item_id": name, "output_index": len(self._done), "content_index": 0}

    def _text_event(self, what: str, **fields: str) -> bytes:
        part, more = ("output_text", {"logprobs": list[Any]()}) if self._open == "text" else ("reasoning_text", {})
        return self._event(f"response.{part}.{what}", **self._place(), **fields, **more)

    def _item_event(self, what: str, item: Item) -> bytes:
        return self._event(f"response.output_item.{what}", output_index=len(self._done), item=item)

    def _lifecycle(self, what: str, status: str, **fields: Any) -> bytes:
        return self._event(f"response.{what}", response=_response(self._opening, status) | fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        data = msgspec.json.encode({"type": kind, "sequence_number": self._sequence} | fields)
        self._sequence += 1
        return b"event: %b\ndata: %b\n\n" % (kind.encode(), data)


# Requests


def _check(body: dict[str, Any]) -> None:
    refuse(body, _REFUSED)
    if "message.output_text.logprobs" in field(body, "include", list, []):
        raise Refusal("unsupported", f"include: {_NO_LOGPROBS}")


def _fields(body: dict[str, Any], offered: list[Item]) -> dict[str, Any]:
    """What a response says of its request; `tools`: those that the model may call."""
    fields = {name: body.get(name) for name in _REPEATED} | {
        "metadata": field(body, "metadata", dict, {}),
        "parallel_tool_calls": field(body, "parallel_tool_calls", bool, True),
        "text": {"format": {"type": "text"}} | field(body, "text", dict, {}),
        "tool_choice": body.get("tool_choice") or "auto",
    }
    if where := number_too_large(fields):
        raise Refusal("bad_request", f"{where}: the number is beyond 64 bits")
    return fields | {"tools": [tool for tool in offered if tool.get("type") not in WEB_SEARCH]}


# Answers


def _deltas(message: Message) -> list[Delta]:
    """A message as the items of its answer, one a delta. There is a text, if empty, where there are no calls: clients
    that keep no reasoning have the turn then."""
    reasoning, calls = message.get("reasoning_content"), message.get("tool_calls", [])
    deltas = [Delta(kind="reasoning", text=reasoning)] if reasoning else []
    deltas += [Delta(kind="text", text=message["content"])] if message["content"] or not calls else []
    return deltas + [Delta(kind="tool_call", call=call) for call in calls]


def _item(opening: Opening, at: int, delta: Delta) -> Item:
    if delta.kind == "tool_call":
        return _call_item(opening, at, delta.call or {})
    item = {"id": item_id(_KINDS[delta.kind], opening.id, at), "status": "completed"}
    if delta.kind == "reasoning":
        seal = sealed(delta.text) if opening.echo.seals and delta.text else None
        content = [{"type": "reasoning_text", "text": delta.text}]
        return item | {"type": "reasoning", "summary": [], "content": content, "encrypted_content": seal}
    part = {"type": "output_text", "text": delta.text, "annotations": [], "logprobs": []}
    return item | {"type": "message", "role": "assistant", "content": [part]}


def _call_item(opening: Opening, at: int, call: dict[str, Any]) -> Item:
    name, arguments = call["function"]["name"], call["function"]["arguments"]
    tool = opening.echo.tools.get(name) or Tool(name, None, custom=False)
    item = {"call_id": call["id"], "name": tool.name, "status": "completed"}
    item |= {"namespace": tool.namespace} if tool.namespace else {}
    if not tool.custom:
        return {"id": item_id("fc", opening.id, at), "type": "function_call", "arguments": arguments} | item
    text = _freeform(arguments)
    named = {"id": item_id(ODD if text is None else "ctc", opening.id, at), "type": "custom_tool_call"}
    return named | {"input": arguments if text is None else text} | item


def _freeform(arguments: str) -> str | None:
    """The text of a custom tool's call; None where the arguments are not one text."""
    try:
        value = whole_characters(json.loads(arguments, strict=False))
    except (ValueError, RecursionError):
        return None
    text = value.get("input") if isinstance(value, dict) and len(value) == 1 else None
    return text if isinstance(text, str) else None


def _status(answer: Answer) -> str:
    return "incomplete" if answer.finish_reason == "length" else "completed"


def _finished(answer: Answer, items: list[Item]) -> dict[str, Any]:
    status, read, written = _status(answer), answer.opening.prompt_tokens, answer.completion_tokens
    usage = {
        "input_tokens": read,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": written,
        "output_tokens_details": {"reasoning_tokens": answer.reasoning_tokens},
        "total_tokens": read + written,
    }
    details = {"reason": "max_output_tokens"} if status == "incomplete" else None
    return _response(answer.opening, status) | {"output": items, "incomplete_details": details, "usage": usage}


def _response(opening: Opening, status: str) -> dict[str, Any]:
    response = {"id": f"resp_{opening.id}", "object": "response", "created_at": opening.created, "status": status}
    kept = {"background": False, "store": False, "truncation": "disabled", "service_tier": "default"}
    absent = dict.fromkeys(("error", "incomplete_details", "previous_response_id", "usage"))
    return response | kept | absent | opening.echo.fields | {"model": opening.model, "output": []}
