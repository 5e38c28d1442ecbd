"""The hand-written renderings of the package `renderers`, on request: for a model whose folder has no chat template, or
one that is not prefix-stable. They are another author's reading of a model's template, so that they are never chosen
where the model's own template was not ruled out by somebody.

Every bridge that the package gives is checked to start with the sequence, id for id. Its parsers read whole answers:
nothing of an answer is relayed before its end. Its bridges take lists, so that a turn costs time in the whole history.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import structlog
from pydantic import TypeAdapter

from polar.errors import ConfigError, TaskFault
from polar.protocols import Delta
from polar.proxy.rendering.chat_template import QUESTION, Message, Tools
from polar.proxy.rendering.folder import TokenizerFolder
from polar.proxy.rendering.grammars import grammar
from polar.proxy.rendering.parsing import arguments_of, call_of
from polar.proxy.rendering.tokens import Tokens, thinking_ids
from polar.records import IDS

log = structlog.get_logger("polar.proxy")


class RenderersRendering:
    """Implements `polar.protocols.Rendering`. Needs no transformers and no torch."""

    def __init__(self, folder: TokenizerFolder, name: str) -> None:
        self.name = folder.name
        self._tokens = Tokens(folder.tokenizer_json)
        self.vocabulary = self._tokens.vocabulary
        self._renderer = _renderer(_Tokenizer(self._tokens, folder), name)
        version = importlib.metadata.version("renderers")
        self.sha256 = hashlib.sha256(folder.tokenizer_json + f"renderers {version} {name}".encode()).hexdigest()
        self.stop_ids = tuple(dict.fromkeys([*self._renderer.get_stop_token_ids(), *folder.eos_ids]))
        self._prompt = self.render([QUESTION], None).tolist()

    def render(self, messages: list[Message], tools: Tools) -> np.ndarray:
        """Raises TaskFault `template` when the package refuses the conversation."""
        shaped = [_with_maps(message) for message in messages]
        try:
            ids = self._renderer.render_ids(shaped, tools=tools, add_generation_prompt=True)
        except Exception as error:  # the package has no error type of its own
            raise TaskFault(f"the renderer refuses this conversation: {error}", name="template") from error
        return np.asarray(ids, IDS)

    def bridge(
        self, sequence: np.ndarray, new_messages: list[Message], tools: Tools, *, sampled: int
    ) -> np.ndarray | None:
        ids, start = sequence.tolist(), len(sequence) - sampled
        shaped = [_with_maps(message) for message in new_messages]
        try:
            bridged = self._renderer.bridge_to_next_turn(ids[:start], ids[start:], shaped, tools=tools)
        except Exception as error:  # the package has no error type of its own
            raise TaskFault(f"the renderer refuses this conversation: {error}", name="template") from error
        if bridged is None or bridged.token_ids[: len(ids)] != ids:
            return None
        return np.asarray(bridged.token_ids[len(ids) :], IDS)

    def parse(self, ids: np.ndarray, tools: Tools) -> Message:
        numbers = ids.tolist()
        try:
            read = self._renderer.parse_response(numbers, tools=tools, prompt_ids=self._prompt)
        except Exception:  # a malformed answer stays text, whatever the package makes of it (case 30)
            log.exception("the package renderers cannot read an answer", folder=self.name)
            return {"role": "assistant", "content": self.decode(ids)}
        tried = [(attempt, _call(attempt) if tools else None) for attempt in read.tool_calls]
        stays = [self._text(attempt, numbers) for attempt, call in tried if call is None]
        message: Message = {"role": "assistant", "content": "\n".join(filter(None, [read.content, *stays]))}
        message |= {"reasoning_content": read.reasoning_content} if read.reasoning_content else {}
        calls = [call for _, call in tried if call is not None]
        return message | ({"tool_calls": calls} if calls else {})

    def reader(self, tools: Tools, stops: Sequence[str]) -> _NothingYet:
        return _NothingYet()

    def thinking(self, ids: np.ndarray) -> int:
        return thinking_ids(lambda start: self.parse(start, None), ids)

    def grammar(self, schema: dict[str, Any] | None, tools: Tools) -> dict[str, Any] | None:
        """The package does not say how it writes calls."""
        return grammar(schema, tools, None, reasoning_open=False)

    def least_tokens(self, texts: Sequence[str], enough: int) -> int:
        return self._tokens.least(texts, enough)

    def decode(self, ids: np.ndarray) -> str:
        return self._tokens.decode(ids)

    def _text(self, attempt: Any, ids: list[int]) -> str:
        start, end = attempt.token_span or (0, 0)
        return self.decode(np.asarray(ids[start:end], IDS)) or attempt.raw


class _NothingYet:
    def feed(self, ids: np.ndarray) -> list[Delta]:
        return []


class _Tokenizer:
    """What the package wants of a tokenizer, without transformers."""

    def __init__(self, tokens: Tokens, folder: TokenizerFolder) -> None:
        self._tokens = tokens
        self.name_or_path = folder.name
        self.unk_token_id: int | None = None
        self.eos_token_id = tokens.number(folder.eos)

    def encode(self, text: str, *args: Any, **options: Any) -> list[int]:
        return self._tokens.encode(text).tolist()

    def decode(self, token_ids: Any, *, skip_special_tokens: bool = False, **options: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        return self._tokens.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        return self._tokens.number(tokens) if isinstance(tokens, str) else [self._tokens.number(t) for t in tokens]


def _renderer(tokenizer: _Tokenizer, name: str) -> Any:
    """Raises ConfigError. The conversation decides what becomes of thinking, so that the package keeps all of it."""
    try:
        from renderers import RendererConfig, create_renderer
        from renderers.base import MODEL_RENDERER_MAP
    except ImportError as error:
        raise ConfigError("rendering renderers:NAME needs the extra: pip install 'polar-rl[renderers]'") from error
    known = sorted({*MODEL_RENDERER_MAP.values()})
    if name not in known:
        raise ConfigError(f"the package renderers has no {name!r}: it has {', '.join(known)}")
    settings = {"name": name, "thinking_retention": "all"}
    try:
        return create_renderer(tokenizer, TypeAdapter(RendererConfig).validate_python(settings))
    except Exception as error:  # the package has no error type of its own
        raise ConfigError(f"renderers:{name} cannot be used with {tokenizer.name_or_path}: {error}") from error


def _call(attempt: Any) -> dict[str, Any] | None:
    return call_of(attempt.name, attempt.arguments) if attempt.status == "ok" else None


def _with_maps(message: Message) -> Message:
    """Arguments that are no map as one, which the package would leave out (case 9)."""
    calls = message.get("tool_calls")
    if not calls:
        return message
    return {**message, "tool_calls": [{**call, "function": _with_map(call["function"])} for call in calls]}


def _with_map(function: dict[str, Any]) -> dict[str, Any]:
    arguments = function.get("arguments") or ""
    value = arguments_of(arguments) if isinstance(arguments, str) else arguments
    if isinstance(value, dict) and isinstance(arguments, str) and arguments.strip():
        return function
    return {**function, "arguments": json.dumps(value if isinstance(value, dict) else {"arguments": value})}
