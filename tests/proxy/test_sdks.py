"""The official SDKs of OpenAI and Anthropic, sync and async, whole and streamed: tools and thinking over three turns
are one chain. (google-genai: test_gemini.)"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest

from dialects import TOOLS
from peers.engine import ScriptedEngine, scripted_engine
from polar.protocols import Rendering
from running_proxy import OpenSession, RunningProxy, running_proxy

CALLS = "".join(
    f'<tool_call>{{"name": "bash", "arguments": {{"cmd": "{cmd}"}}}}</tool_call>' for cmd in ("ls", "pwd é")
)
SCRIPT = [{"text": f"<think>\nhm\n</think>\n\nlook {CALLS}"}, {"text": "<think>so</think>done"}, {"text": "bye"}]


@pytest.fixture(scope="module")
def house(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Path, rendering: Rendering
) -> Iterator[tuple[ScriptedEngine, RunningProxy]]:
    with (
        scripted_engine(tokenizer) as engine,
        running_proxy(tmp_path_factory.mktemp("house"), engine.url, rendering) as proxy,
    ):
        yield engine, proxy


async def done(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


@asynccontextmanager
async def entered(manager: Any) -> AsyncIterator[Any]:
    """A client or stream of either kind."""
    if isinstance(manager, AbstractContextManager):
        with manager as made:
            yield made
    else:
        async with manager as made:
            yield made


class Chat:
    """One turn of an SDK: `ask` sends and keeps the answer, `results` answers its calls."""

    clients: tuple[Any, Any] = (openai.OpenAI, openai.AsyncOpenAI)

    def __init__(self, session: OpenSession, asynchronous: bool, streamed: bool) -> None:
        self.kind, self.streamed = self.clients[asynchronous], streamed
        self.options = {"base_url": session.url + "/v1", "api_key": session.key, "max_retries": 0}
        self.history: list[Any] = [{"role": "user", "content": "list"}]

    def route(self, client: Any) -> tuple[Any, dict[str, Any], str]:
        return client.chat.completions, {"messages": self.history, "tools": TOOLS["openai_chat"]}, "completion"

    async def answer(self) -> Any:
        async with entered(self.kind(**self.options)) as client:
            api, asked, name = self.route(client)
            asked |= {"model": "policy"}
            if not self.streamed:
                return await done(api.create(**asked))
            async with entered(api.stream(**asked)) as stream:
                return await done(getattr(stream, f"get_final_{name}")())

    def user(self, text: str) -> None:
        self.history.append({"role": "user", "content": text})

    async def ask(self) -> tuple[str, list[Any]]:
        message = (await self.answer()).choices[0].message
        self.history.append(message.to_dict())
        calls = [(call.id, json.loads(call.function.arguments)) for call in message.tool_calls or []]
        return message.content or "", calls

    def results(self, names: list[str]) -> None:
        self.history += [{"role": "tool", "tool_call_id": name, "content": "ok"} for name in names]


class Responses(Chat):
    def route(self, client: Any) -> tuple[Any, dict[str, Any], str]:
        asked = {"input": self.history, "tools": TOOLS["openai_responses"], "store": False}
        return client.responses, asked | {"include": ["reasoning.encrypted_content"]}, "response"

    async def ask(self) -> tuple[str, list[Any]]:
        response = await self.answer()
        hidden = {"parsed_arguments", "parsed"}
        items = [{k: v for k, v in item.to_dict().items() if k not in hidden} for item in response.output]
        self.history += items
        calls = [(item["call_id"], json.loads(item["arguments"])) for item in items if "call_id" in item]
        return response.output_text, calls

    def results(self, names: list[str]) -> None:
        self.history += [{"type": "function_call_output", "call_id": name, "output": "ok"} for name in names]


class Messages(Chat):
    clients = (anthropic.Anthropic, anthropic.AsyncAnthropic)

    def __init__(self, session: OpenSession, asynchronous: bool, streamed: bool) -> None:
        super().__init__(session, asynchronous, streamed)
        self.options |= {"base_url": session.url}

    def route(self, client: Any) -> tuple[Any, dict[str, Any], str]:
        return client.messages, {"messages": self.history, "tools": TOOLS["anthropic"], "max_tokens": 500}, "message"

    async def ask(self) -> tuple[str, list[Any]]:
        message = await self.answer()
        self.history.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        for block in self.history[-1]["content"]:
            block.pop("parsed_output", None)
        calls = [(block.id, block.input) for block in message.content if block.type == "tool_use"]
        return "".join(block.text for block in message.content if block.type == "text"), calls

    def results(self, names: list[str]) -> None:
        blocks = [{"type": "tool_result", "tool_use_id": name, "content": "ok"} for name in names]
        self.history.append({"role": "user", "content": blocks})


async def converse(turns: Chat) -> None:
    text, calls = await turns.ask()
    assert (text, [arguments for _, arguments in calls]) == ("look", [{"cmd": "ls"}, {"cmd": "pwd é"}])
    turns.results([name for name, _ in calls])
    assert await turns.ask() == ("done", [])
    turns.user("more")
    assert await turns.ask() == ("bye", [])


KINDS: list[Callable[..., Chat]] = [Chat, Responses, Messages]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_three_turns_are_one_chain(
    house: tuple[ScriptedEngine, RunningProxy], kind: Callable[..., Chat], asynchronous: bool, streamed: bool
) -> None:
    engine, proxy = house
    engine.script(*SCRIPT)
    session = proxy.open()
    asyncio.run(converse(kind(session, asynchronous, streamed)))
    _, log = session.end()
    assert [call.prompt.source for call in log.calls] == ["rendered", "continued", "continued"]
    assert all(call.delivered for call in log.calls)
    assert [call.opened.stream for call in log.calls] == [streamed] * 3
    built = session.build()
    assert len(built.traces) == 1
    assert built.tokens.trainable == built.tokens.sampled == sum(len(call.ids) for call in log.calls)
