"""Sampled text to messages: whole and in pieces are one, and what is malformed stays text (case 30)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.protocols import Delta, Rendering
from polar.proxy.rendering.parsing import Scanner, arguments_of, parse_text

CALL = '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>'
BITS = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    CALL,
    " ",
    "\n",
    "a",
    "é🙂",
    '{"name": "f"}',
    "STOP",
    "<t",
]
texts = st.lists(st.sampled_from(BITS), max_size=12).map("".join)


def in_pieces(text: str, sizes: list[int], **settings: Any) -> list[Delta]:
    scanner = Scanner(**settings)
    deltas: list[Delta] = []
    for size in sizes:
        deltas += scanner.feed(text[:size])
        text = text[size:]
    return deltas + scanner.feed(text)


@given(texts, st.lists(st.integers(1, 7), max_size=40), st.booleans(), st.booleans())
def test_what_is_relayed_is_a_prefix_of_the_message(
    text: str, sizes: list[int], tools: bool, reasoning_open: bool
) -> None:
    message = parse_text(text, tools=tools, reasoning_open=reasoning_open)
    deltas = in_pieces(text, sizes, tools=tools, reasoning_open=reasoning_open, stops=[])
    relayed = "".join(delta.text for delta in deltas if delta.kind == "text")
    assert message["content"].startswith(relayed)
    for delta in deltas:
        assert delta.kind != "reasoning" or delta.text == message["reasoning_content"]


@given(texts, st.lists(st.integers(1, 7), max_size=40))
def test_nothing_behind_a_stop_string_is_relayed(text: str, sizes: list[int]) -> None:
    deltas = in_pieces(text, sizes, tools=False, reasoning_open=False, stops=["STOP"])
    relayed = "".join(delta.text for delta in deltas if delta.kind == "text")
    assert "STOP" not in relayed
    content = parse_text(text, tools=False, reasoning_open=False)["content"]
    assert content.partition("STOP")[0].startswith(relayed)


@given(texts, st.booleans())
def test_without_tools_markup_is_text(text: str, reasoning_open: bool) -> None:
    message = parse_text(text, tools=False, reasoning_open=reasoning_open)
    assert "tool_calls" not in message
    assert text.endswith(message["content"])


@given(st.lists(st.integers(0, 266), max_size=60))
def test_any_ids_are_read_and_parsed_alike(rendering: Rendering, numbers: list[int]) -> None:
    ids = np.asarray(numbers, np.int32)
    tools = [{"type": "function", "function": {"name": "f"}}]
    reader = rendering.reader(tools, [])
    relayed = "".join(d.text for number in ids for d in reader.feed(np.asarray([number])) if d.kind == "text")
    assert rendering.parse(ids, tools)["content"].startswith(relayed)


@pytest.mark.parametrize(
    "text",
    [
        "<function=x",
        '<tool_call>{"name": "f", "arg',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
        '<tool_call>{"name": "f"}',
        "<tool_call>" + "[" * 5000,
    ],
)
def test_a_malformed_call_stays_text(text: str) -> None:
    assert parse_text(text, tools=True, reasoning_open=False) == {"role": "assistant", "content": text}


def test_good_calls_beside_bad_ones_are_calls() -> None:
    message = parse_text(f"a {CALL} <tool_call>bad</tool_call> b", tools=True, reasoning_open=False)
    assert message["content"] == "a  <tool_call>bad</tool_call> b"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_reasoning_that_the_prompt_opened_or_the_length_cut() -> None:
    assert parse_text("hm</think>\nso", tools=True, reasoning_open=True) == {
        "role": "assistant",
        "content": "so",
        "reasoning_content": "hm",
    }
    assert parse_text("<think>hm", tools=True, reasoning_open=False)["reasoning_content"] == "hm"


@pytest.mark.parametrize(
    ("text", "value"),
    [("{}", {}), ("", {}), ("null", {}), ('{"a":1', '{"a":1'), ("[1]", [1]), ('{"a": 1}', {"a": 1})],
)
def test_arguments_are_read_where_they_can_be(text: str, value: Any) -> None:
    assert arguments_of(text) == value
