"""Messages as text that a person can read in a trainer's log: it is shown, never tokenised."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any


def readable(messages: Sequence[dict[str, Any]]) -> str:
    """The response's messages: roles other than the assistant's are named; tool calls are shown as calls."""
    return "\n".join(filter(None, (_readable(message) for message in messages)))


def instruction_of(prompt: str | Sequence[dict[str, Any]]) -> str:
    """What the agent is told to do: a text as it is; of messages, what the user says (else everything)."""
    if isinstance(prompt, str):
        return prompt
    said = [text_of(message) for message in prompt if message.get("role") == "user"]
    return "\n\n".join(said or [text_of(message) for message in prompt])


def mistake_in(prompt: Any) -> str | None:
    """Why it is no prompt; None where it is text or a list of messages."""
    if isinstance(prompt, str):
        return None
    if not isinstance(prompt, list):
        return f"is {json.dumps(prompt, default=repr):.60}, neither text nor a list of messages"
    wrong = next((message for message in prompt if not _is_message(message)), None)
    return None if wrong is None else f"has {json.dumps(wrong, default=repr):.60}, which is no message"


def _is_message(message: Any) -> bool:
    content = message.get("content") if isinstance(message, Mapping) else 0
    parts = content if isinstance(content, list) else []
    return isinstance(content, str | list | None) and all(isinstance(part, str | Mapping) for part in parts)


def text_of(message: dict[str, Any]) -> str:
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    return "".join(_part(part) for part in content)


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    return part["text"] if isinstance(part.get("text"), str) else f"<{part.get('type', 'part')}>"


def _readable(message: dict[str, Any]) -> str:
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    pieces = [f"<think>{reasoning}</think>" if reasoning else "", text_of(message)]
    pieces += [_call(call) for call in message.get("tool_calls") or []]
    text = "\n".join(filter(None, pieces))
    role = message.get("role", "assistant")
    return text if role == "assistant" or not text else f"[{role}] {text}"


def _call(call: dict[str, Any]) -> str:
    function = call.get("function", call)
    arguments = function.get("arguments", "")
    shown = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function.get('name', '?')}({shown})"
