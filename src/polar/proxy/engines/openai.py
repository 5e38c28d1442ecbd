"""Any server with OpenAI chat completions: it renders and parses itself. Without token ids nothing is trainable."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from polar.errors import EngineFault, PolicyFault
from polar.protocols import EngineCall, EngineFacts, Piece
from polar.proxy.engines.http import PATIENCE_SECONDS, EngineHTTP, ids_of, readable
from polar.proxy.engines.probing import probed
from polar.records import IDS, LOGPROBS

ROUTE = "/v1/chat/completions"
_COUNTED = ("prompt_tokens", "completion_tokens", "reasoning_tokens")
_DEFAULTS = {"top_k": -1}
"""said to engines that need it said; others do not know these fields"""


class Tokens(NamedTuple):
    """`ids` [n], their logprobs [n] or None, and the prompt's ids where they are told."""

    ids: np.ndarray
    logprobs: np.ndarray | None
    prompt: list[int] | None


class OpenAI(EngineHTTP):
    kind = "openai"
    takes_ids = False
    grammars = True
    extras: ClassVar[Mapping[str, Any]] = {}
    """request fields of this engine's own"""
    defaults: ClassVar[Mapping[str, Any]] = {}
    """of settings that this engine has to be told"""

    def __init__(self, base_url: str, patience_seconds: float = PATIENCE_SECONDS) -> None:
        super().__init__(base_url.removesuffix("/v1"), patience_seconds)
        self._model: str | None = None

    async def generate(self, call: EngineCall) -> AsyncIterator[Piece]:
        body = await self._request(call)
        try:
            async for piece in self._pieces(call, body):
                yield piece
        except PolicyFault:
            # Prompt and max_tokens together were too long; without it the engine takes what room there is.
            if body.pop("max_tokens", None) is None:
                raise
            async for piece in self._pieces(call, body):
                yield piece

    async def probe(self) -> EngineFacts:
        facts = EngineFacts(kind=self.kind, healthy=False, route=ROUTE)
        return await probed(facts, self._ask(facts), self.base_url)

    def tokens(self, document: dict[str, Any], choice: dict[str, Any]) -> Tokens:
        """What a document of an answer says of its tokens."""
        ids = ids_of(choice.get("token_ids") or [])
        prompt = document.get("prompt_token_ids") or choice.get("prompt_token_ids")
        return Tokens(ids, aligned(choice, len(ids)), prompt)

    def check(self, pieces: list[Piece]) -> None:
        """Raises EngineFault `engine_lies` when an answer lacks what this engine promises."""

    async def describe(self, facts: EngineFacts) -> None:
        [model, *_] = (await self.facts("/v1/models")).get("data") or [{}]
        facts.model = self._model = model.get("id")
        facts.context_length = model.get("max_model_len")
        facts.tokenizer_path = model.get("root")

    async def model(self) -> str:
        if self._model is None:
            await self.describe(EngineFacts(kind=self.kind, healthy=False))
        return self._model or "policy"

    async def _ask(self, facts: EngineFacts) -> None:
        await self.describe(facts)
        question = [{"role": "user", "content": "hi"}]
        call = EngineCall(rid="", stream=False, messages=question, sampling={"max_tokens": 1, "temperature": 1.0})
        pieces = [piece async for piece in self.generate(call)]
        facts.version = pieces[-1].version

    async def _request(self, call: EngineCall) -> dict[str, Any]:
        given = {name: value for name, value in call.sampling.items() if value != _DEFAULTS.get(name)}
        body: dict[str, Any] = {
            "model": await self.model(),
            "messages": _wired(call.messages or []),
            "stream": call.stream,
        }
        body |= {**self.defaults, **given, **self.extras}
        if call.json_schema is not None:
            schema = {"name": "answer", "schema": call.json_schema, "strict": True}
            body["response_format"] = {"type": "json_schema", "json_schema": schema}
        if call.tools:
            choice = call.tool_choice
            named = {"type": "function", "function": choice} if isinstance(choice, dict) else choice
            body |= {"tools": call.tools, "tool_choice": named}
            body |= {} if call.parallel_calls else {"parallel_tool_calls": False}
        return body | ({"stream_options": {"include_usage": True}} if call.stream else {})

    async def _pieces(self, call: EngineCall, body: dict[str, Any]) -> AsyncIterator[Piece]:
        async with self.post(ROUTE, body) as response:
            reply = _Reply(self.tokens)
            if call.stream:
                async for document in self.events(response):
                    with readable():
                        piece = reply.piece(document, "delta")
                    yield piece
            else:
                document = await self.document(response)
                with readable():
                    piece = reply.piece(document, "message")
                yield piece
            last = reply.last()
            self.check([*reply.pieces, last])
            yield last


def _wired(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With images in their places."""
    return [
        {name: value for name, value in message.items() if name != "parts"} | {"content": message["parts"]}
        if "parts" in message
        else message
        for message in messages
    ]


class _Reply:
    """What the answer has said so far: pieces of tokens, and the message that they make."""

    def __init__(self, tokens: Callable[[dict[str, Any], dict[str, Any]], Tokens]) -> None:
        self._tokens = tokens
        self.pieces: list[Piece] = []
        self._message: dict[str, Any] = {"role": "assistant", "content": ""}
        self._calls: dict[int, dict[str, Any]] = {}
        self._finish: str | None = None
        self._matched: int | str | None = None
        self._usage: dict[str, int] = {}
        self._version: str | None = None

    def piece(self, document: dict[str, Any], part: str) -> Piece:
        """`part`: delta in an event of a stream, message in a whole answer."""
        version = (document.get("metadata") or {}).get("weight_version")
        self._version = str(version) if version is not None else self._version
        usage = document.get("usage") or {}
        usage = usage | (usage.get("completion_tokens_details") or {})
        self._usage |= {name: usage[name] for name in _COUNTED if usage.get(name)}
        choice = (document.get("choices") or [{}])[0]
        said = choice.get(part) or {}
        self._read(said, choice)
        ids, logprobs, prompt = self._tokens(document, choice)
        made = Piece(
            ids=ids,
            logprobs=logprobs,
            text=said.get("content") or "",
            reasoning=_reasoning(said),
            version=self._version,
            prompt_ids=ids_of(prompt) if prompt else None,
        )
        self.pieces.append(made)
        return made

    def last(self) -> Piece:
        if self._finish is None:
            raise EngineFault("the engine's answer has no finish_reason", name="engine_error")
        calls = [self._calls[at] for at in sorted(self._calls)]
        message = self._message | ({"tool_calls": calls} if calls else {})
        return Piece(
            ids=np.empty(0, IDS),
            version=self._version,
            finish_reason=self._finish,
            matched=self._matched,
            message=message,
            usage=self._usage,
        )

    def _read(self, said: dict[str, Any], choice: dict[str, Any]) -> None:
        self._finish = choice.get("finish_reason") or self._finish
        self._matched = choice.get("stop_reason") or choice.get("matched_stop") or self._matched
        self._message["content"] += said.get("content") or ""
        if reasoning := _reasoning(said):
            self._message["reasoning_content"] = self._message.get("reasoning_content", "") + reasoning
        for at, call in enumerate(said.get("tool_calls") or []):
            known = self._calls.setdefault(call.get("index", at), _empty_call())
            function = call.get("function") or {}
            known["id"] = call.get("id") or known["id"]
            known["function"]["name"] += function.get("name") or ""
            known["function"]["arguments"] += function.get("arguments") or ""


def _reasoning(said: dict[str, Any]) -> str:
    return said.get("reasoning") or said.get("reasoning_content") or ""


def _empty_call() -> dict[str, Any]:
    return {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}


def aligned(choice: dict[str, Any], count: int) -> np.ndarray | None:
    """The sampled tokens' own (case 16: never those of top_logprobs); None where they are not one a token."""
    content = (choice.get("logprobs") or {}).get("content") or []
    return np.asarray([entry.get("logprob") for entry in content], LOGPROBS) if len(content) == count else None
