"""A model's chat template: messages to text. In which shape it takes tool calls is found out at start, not assumed.

Nothing is left out in silence: messages that a template refuses are reshaped as far as they still say the same, and
else refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

from polar.errors import TaskFault
from polar.proxy.rendering.jinja import REFUSES, environment
from polar.proxy.rendering.parsing import arguments_of

Message = dict[str, Any]
Tools = list[dict[str, Any]] | None

QUESTION: Message = {"role": "user", "content": "question"}
TOOL = {"type": "function", "function": {"name": "tool", "description": "", "parameters": {"type": "object"}}}
_PROBE = {"key 4c1f": "value"}
_SHAPES = [(False, False), (False, True), (True, False), (True, True)]
"""content is null beside calls; arguments are JSON text"""


class ChatTemplate:
    """`special_tokens`: what the template may call bos_token, eos_token, … Raises jinja2.TemplateError."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        self._template = environment().from_string(source)
        self._names = special_tokens
        fit = next((shape for shape in _SHAPES if self._fits(shape)), None)
        self.writes_calls = fit is not None
        self._null_content, self._text_arguments = fit or (False, False)

    def writes_tools(self) -> bool:
        """Whether the model is told which tools it has."""
        return self.text([QUESTION], [TOOL], prompt=True) != self.text([QUESTION], None, prompt=True)

    def text(self, messages: list[Message], tools: Tools, *, prompt: bool) -> str:
        """`prompt`: with what opens the answer. Raises TaskFault `template` when the conversation is refused."""
        refused: Exception | None = None
        for shaped in self._shapes(messages):
            try:
                return self._fill(shaped, tools, prompt)
            except REFUSES as error:
                refused = refused or error
        raise TaskFault(f"the chat template refuses this conversation: {refused}", name="template") from refused

    def _shapes(self, messages: list[Message]) -> Iterator[list[Message]]:
        shaped = [self._shaped(message) for message in messages]
        yield shaped
        tame = [self._tame(message, first=at == 0) for at, message in enumerate(shaped)]
        if tame != shaped:
            yield tame

    def _tame(self, message: Message, *, first: bool) -> Message:
        """For templates that take nothing else: arguments that are no map as one, a system message in the middle as
        the user's."""
        if message["role"] == "system" and not first:
            return {**message, "role": "user"}
        calls = message.get("tool_calls")
        if not calls or self._text_arguments:
            return message
        return {**message, "tool_calls": [_call(call, _as_map) for call in calls]}

    def _shaped(self, message: Message) -> Message:
        """Templates test content with `in`, and walk arguments as a map (case 9)."""
        calls = message.get("tool_calls")
        if not calls:
            return {**message, "content": message.get("content") or ""}
        content = message.get("content") or (None if self._null_content else "")
        read = _as_text if self._text_arguments else _as_value
        return {**message, "content": content, "tool_calls": [_call(call, read) for call in calls]}

    def _fill(self, messages: list[Message], tools: Tools, prompt: bool) -> str:
        return self._template.render(
            messages=messages, tools=tools or None, documents=None, add_generation_prompt=prompt, **self._names
        )

    def _fits(self, shape: tuple[bool, bool]) -> bool:
        """Whether a call in this shape is written, and its arguments not as Python writes a map."""
        null_content, text_arguments = shape
        call = call_of("tool", json.dumps(_PROBE) if text_arguments else _PROBE)
        asked = {"role": "assistant", "content": None if null_content else "", "tool_calls": [call]}
        try:
            text = self._fill([QUESTION, asked], None, False)
        except REFUSES:
            return False
        return all(key in text for key in _PROBE) and repr(_PROBE) not in text


def call_of(name: str, arguments: Any, number: str = "call_0") -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


def _call(call: dict[str, Any], read: Callable[[Any], Any]) -> dict[str, Any]:
    return {**call, "function": {**call["function"], "arguments": read(call["function"].get("arguments"))}}


def _as_value(arguments: Any) -> Any:
    return arguments_of(arguments or "") if isinstance(arguments or "", str) else arguments


def _as_text(arguments: Any) -> str:
    return arguments or "{}" if isinstance(arguments or "", str) else json.dumps(arguments, ensure_ascii=False)


def _as_map(arguments: Any) -> Any:
    return arguments if isinstance(arguments, dict) else {"arguments": arguments}
