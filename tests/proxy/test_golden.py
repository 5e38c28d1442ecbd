"""What goes over the wire of chat completions and Anthropic Messages, byte for byte, and as their SDKs declare it.
(Responses and Gemini: test_openai_responses.py, test_gemini.py.)"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from anthropic.types import Message as AnthropicMessage
from anthropic.types import RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel, TypeAdapter

from polar.protocols import Delta
from polar.proxy.canonical import Answer, Opening, Refusal
from polar.proxy.dialects import DIALECTS

GOLDEN = Path(__file__).parent / "golden"
DECLARED: dict[str, tuple[Any, Any]] = {
    "openai_chat": (ChatCompletion, ChatCompletionChunk),
    "anthropic": (AnthropicMessage, RawMessageStreamEvent),
}
OURS = {"reasoning_content"}
"""what the SDK does not declare: servers of open models say reasoning so"""


def call(name: str, arguments: str, number: str) -> dict[str, Any]:
    return {"id": number, "type": "function", "function": {"name": name, "arguments": arguments}}


CALLS = [call("bash", '{"cmd": "ls é"}', "call_1"), call("bash", "{}", "call_2")]
DELTAS = [
    *(Delta(kind="reasoning", text="h"), Delta(kind="reasoning", text="m")),
    *(Delta(kind="text", text="a"), Delta(kind="text", text=" b")),
    *(Delta(kind="tool_call", call=item) for item in CALLS),
]
OPENING = Opening(
    id="0123456789abcdef01234567", model="policy", created=1700000000, prompt_tokens=7, usage_in_stream=True
)
ANSWER = Answer(
    opening=OPENING,
    message={"role": "assistant", "reasoning_content": "hm", "content": "a b", "tool_calls": CALLS},
    finish_reason="tool_calls",
    completion_tokens=9,
    reasoning_tokens=4,
    logprobs=[("h", -0.5), ("m", -1.5)],
)


def extras(value: Any) -> Iterator[str]:
    """Fields that a parsed document has beside those declared."""
    if isinstance(value, BaseModel):
        yield from value.model_extra or {}
        value = [getattr(value, name) for name in type(value).model_fields]
    if isinstance(value, list):
        for item in value:
            yield from extras(item)


@pytest.mark.parametrize("dialect", DECLARED)
def test_a_whole_answer_is_the_golden_one(dialect: str) -> None:
    document = DIALECTS[dialect].whole(ANSWER)
    assert document == json.loads((GOLDEN / f"{dialect}.json").read_text())
    assert set(extras(TypeAdapter(DECLARED[dialect][0]).validate_python(document))) <= OURS


@pytest.mark.parametrize("dialect", DECLARED)
def test_events_are_the_golden_ones(dialect: str) -> None:
    encoder = DIALECTS[dialect].encoder(OPENING)
    data = encoder.start() + b"".join(map(encoder.delta, DELTAS)) + encoder.keep_alive() + encoder.end(ANSWER)
    data += DIALECTS[dialect].encoder(OPENING).error(Refusal("engine", "it is gone"))
    assert data.decode() == (GOLDEN / f"{dialect}.sse").read_text()
    documents = [json.loads(line[6:]) for line in data.decode().split("\n") if line.startswith("data: {")]
    declared = TypeAdapter(DECLARED[dialect][1])
    for document in documents:
        if "error" not in document and document.get("type") != "ping":
            assert set(extras(declared.validate_python(document))) <= OURS
