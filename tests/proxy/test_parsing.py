"""Sampled text to messages: whole and in pieces are one, and what is malformed stays text (case 30)."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.protocols import Delta, Rendering
from polar.proxy.rendering.formats import FORMATS, Coder, DeepSeek, Hermes, Llama, format_of
from polar.proxy.rendering.harmony import Harmony
from polar.proxy.rendering.parsing import Format, arguments_of

SCHEMA = {"type": "object", "properties": {"n": {"type": "integer"}, "t": {"type": "string"}, "o": {"type": "object"}}}
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": SCHEMA}}]
PLAIN = ["<think>", "</think>", " ", "\n", "a", "é🙂", "STOP", "<", "<t", "{", "}", '{"a": 1}', "null"]
BITS = {
    Hermes: ["<tool_call>", "</tool_call>", '<tool_call>{"name": "f", "arguments": {"a": "<tool_call>"}}</tool_call>'],
    Coder: [
        "<tool_call>",
        "</tool_call>",
        "<function=f>",
        "</function>",
        "<parameter=n>",
        "</parameter>",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\n</tool_call>",
    ],
    DeepSeek: [
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁sep｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁calls▁end｜>",
        "f",
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜>",
    ],
    Llama: ["<|python_tag|>", '{"name": "f", "parameters": {"a": 1}}', ";", '{"name": "g", "parameters": {}}'],
    Harmony: [
        "<|channel|>analysis<|message|>",
        "<|channel|>final<|message|>",
        "<|channel|>commentary<|message|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{}<|call|>",
        "<|end|>",
        "<|start|>assistant",
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|return|>",
        " to=functions.f",
    ],
}
formats = pytest.mark.parametrize("form", FORMATS, ids=lambda form: type(form).__name__)


def texts(form: Format) -> st.SearchStrategy[str]:
    return st.lists(st.sampled_from(PLAIN + BITS[type(form)] * 2), max_size=12).map("".join)


def in_pieces(form: Format, text: str, sizes: list[int], tools: Any, **settings: Any) -> list[Delta]:
    scanner = form.scanner(tools, **({"reasoning_open": False, "stops": []} | settings))
    deltas: list[Delta] = []
    for size in sizes:
        deltas += scanner.feed(text[:size])
        text = text[size:]
    return deltas + scanner.feed(text)


def relayed(deltas: list[Delta], kind: str = "text") -> str:
    return "".join(delta.text for delta in deltas if delta.kind == kind)


@formats
@given(st.data())
def test_what_is_relayed_is_a_prefix_of_the_message(form: Format, data: st.DataObject) -> None:
    text, sizes = data.draw(texts(form)), data.draw(st.lists(st.integers(1, 7), max_size=40))
    tools, reasoning_open = data.draw(st.sampled_from([TOOLS, None])), data.draw(st.booleans())
    message = form.parse(text, tools, reasoning_open=reasoning_open)
    deltas = in_pieces(form, text, sizes, tools, reasoning_open=reasoning_open)
    assert message["content"].startswith(relayed(deltas))
    thoughts = relayed(deltas, "reasoning")
    assert message.get("reasoning_content", "").startswith(thoughts)
    assert not relayed(deltas) or thoughts == message.get("reasoning_content", "")
    kinds = [delta.kind for delta in deltas]
    assert kinds == sorted(kinds), "reasoning comes first"
    for call in message.get("tool_calls", []):
        assert isinstance(json.loads(call["function"]["arguments"]), dict)


@formats
@given(st.data())
def test_nothing_behind_a_stop_string_is_relayed(form: Format, data: st.DataObject) -> None:
    text, sizes = data.draw(texts(form)), data.draw(st.lists(st.integers(1, 7), max_size=40))
    said = relayed(in_pieces(form, text, sizes, None, stops=["STOP"]))
    assert "STOP" not in said
    assert "STOP" not in relayed(in_pieces(form, text, sizes, None, stops=["STOP"]), "reasoning")
    content = form.parse(text, None, reasoning_open=False)["content"]
    assert content.partition("STOP")[0].startswith(said)


@formats
def test_plain_text_is_relayed_as_it_comes(form: Format) -> None:
    said = [relayed(in_pieces(form, text, [3, 3], TOOLS)) for text in ("hello", "hello there", " 1 < 2, and so on")]
    assert said == ["hello", "hello there", " 1 < 2, and so on"]


@formats
@given(st.data())
def test_without_tools_markup_is_text(form: Format, data: st.DataObject) -> None:
    text, reasoning_open = data.draw(texts(form)), data.draw(st.booleans())
    message = form.parse(text, None, reasoning_open=reasoning_open)
    assert "tool_calls" not in message
    if not isinstance(form, Harmony):
        assert text.endswith(message["content"])


@given(st.lists(st.integers(0, 266), max_size=60))
def test_any_ids_are_read_and_parsed_alike(rendering: Rendering, numbers: list[int]) -> None:
    ids = np.asarray(numbers, np.int32)
    reader = rendering.reader(TOOLS, [])
    said = relayed([delta for number in ids for delta in reader.feed(np.asarray([number]))])
    assert rendering.parse(ids, TOOLS)["content"].startswith(said)


MALFORMED = {
    Hermes: [
        "<function=x",
        '<tool_call>{"name": "f", "arg',
        '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "f", "arguments": NaN}</tool_call>',
        '<tool_call>{"name": "f"}',
        "<tool_call>" + "[" * 5000,
    ],
    Coder: [
        "<function=x",
        "<tool_call><function=f><parameter=n>1</parameter>",
        "<function=f><parameter=n>1</function>",
        "<function=f>1</function></tool_call>",
        "<function=></function>",
        "<function=f><parameter=n>" * 2000 + "</parameter>x</function>",
    ],
    DeepSeek: [
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f",
        '<｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": <｜tool▁call▁end｜>',
        "<｜tool▁call▁begin｜>f<｜tool▁sep｜>[1]<｜tool▁call▁end｜>",
        "<｜tool▁call▁begin｜><｜tool▁sep｜>{}<｜tool▁call▁end｜>",
        '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1',
    ],
    Llama: [
        '{"name": "f", "parameters": {"a',
        '{"name": "unknown", "parameters": {}}',
        '{"name": "f", "parameters": [1]}',
        '{"name": "f", "parameters": {}} and so on',
        '{"name": "f", "parameters": {}}; {"name": "f", "parameters": {}}',
        "<|python_tag|>print(1)",
        '<|python_tag|>{"parameters": {}}',
    ],
    Harmony: [
        '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": ',
        "<|channel|>commentary to=functions.f<|message|>[1]",
        "<|channel|>commentary to=python<|message|>{}",
        "<|channel|>final",
        "<|channel|>commentary to=functions.f<|message|>",
    ],
}


@pytest.mark.parametrize(("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts])
def test_a_malformed_call_stays_text(form: type[Format], text: str) -> None:
    assert form().parse(text, TOOLS, reasoning_open=False) == {"role": "assistant", "content": text}


CALLS: list[tuple[type[Format], str, str, list[tuple[str, Any]]]] = [
    (Hermes, 'a <tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>', "a", [("f", {"a": "é"})]),
    (Hermes, '<tool_call>{"name": "unknown"}</tool_call>', "", [("unknown", {})]),
    (
        Coder,
        "so\n\n<tool_call>\n<function=f>\n<parameter=n>\n3\n</parameter>\n<parameter=t>\n4\n</parameter>\n"
        '<parameter=o>\n{"a": [1]}\n</parameter>\n<parameter=x>\n<a>\n</parameter>\n</a>\n</parameter>\n'
        "</function>\n</tool_call>",
        "so",
        [("f", {"n": 3, "t": "4", "o": {"a": [1]}, "x": "<a>\n</parameter>\n</a>"})],
    ),
    (
        Coder,
        "<function=f></function> <function=g><parameter=n>{</parameter></function>",
        "",
        [("f", {}), ("g", {"n": "{"})],
    ),
    (Coder, "<function=f><parameter=n>x</parameter></function>", "", [("f", {"n": "x"})]),
    (
        DeepSeek,
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n"
        '{"a": "```<｜tool▁call▁end｜>"}\n```'
        "<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜>"
        "<｜tool▁calls▁end｜>",
        "",
        [("f", {"a": "```<｜tool▁call▁end｜>"}), ("g", {})],
    ),
    (
        DeepSeek,
        'go\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        "go",
        [("f", {"a": 1})],
    ),
    (Llama, '<|python_tag|>{"name": "unknown", "parameters": {"a": 1}}', "", [("unknown", {"a": 1})]),
    (Llama, ' {"name": "f", "arguments": {"b": 2}}\n', "", [("f", {"b": 2})]),
    (
        Harmony,
        "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
        '<|constrain|>json<|message|>{"a": 1}<|call|>',
        "I look.",
        [("f", {"a": 1})],
    ),
    (Harmony, ' to=functions.unknown<|channel|>commentary json<|message|>{"a": 1}', "", [("unknown", {"a": 1})]),
]


@pytest.mark.parametrize(("form", "text", "content", "calls"), CALLS)
def test_calls_are_read(form: type[Format], text: str, content: str, calls: list[tuple[str, Any]]) -> None:
    message = form().parse(text, TOOLS, reasoning_open=False)
    found = [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]
    assert (message["content"], found) == (content, calls)
    assert form().parse(text, None, reasoning_open=False)["content"].strip() == text.strip() or form is Harmony


def test_good_calls_beside_bad_ones_are_calls() -> None:
    text = 'a <tool_call>{"name": "f"}</tool_call> <tool_call>bad</tool_call> b'
    message = Hermes().parse(text, TOOLS, reasoning_open=False)
    assert message["content"] == "a  <tool_call>bad</tool_call> b"
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["f"]


def test_reasoning_that_the_prompt_opened_or_the_length_cut() -> None:
    said = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    assert Hermes().parse("hm</think>\nso", TOOLS, reasoning_open=True) == said
    assert Hermes().parse("<think>hm", TOOLS, reasoning_open=False)["reasoning_content"] == "hm"
    assert (
        Harmony().parse("hm<|end|><|start|>assistant<|channel|>final<|message|>so", None, reasoning_open=True) == said
    )
    assert Harmony().parse("<|channel|>analysis<|message|>hm", TOOLS, reasoning_open=False)["reasoning_content"] == "hm"


def test_channels_are_relayed_as_they_come() -> None:
    """What was said on the way waits for the final one, since a call may follow it."""
    bodies = [
        "analysis<|message|>hm, ",
        "one<|end|>",
        "commentary<|message|>wait<|end|>",
        "analysis<|message|>two<|end|>",
    ]
    text = "".join(body if body == "one<|end|>" else f"<|start|>assistant<|channel|>{body}" for body in bodies)
    text = text.removeprefix("<|start|>assistant") + "<|start|>assistant<|channel|>final<|message|>so <b> it is"
    deltas = in_pieces(Harmony(), text, [4] * 99, TOOLS)
    thoughts = [delta.text for delta in deltas if delta.kind == "reasoning"]
    assert ("".join(thoughts), len(thoughts) > 2) == ("hm, one\ntwo", True)
    assert relayed(deltas) == "wait\nso <b> it is"


@pytest.mark.parametrize("opened", [True, False])
@pytest.mark.parametrize("form", [Hermes(), Coder(), DeepSeek(), Llama()], ids=lambda form: type(form).__name__)
def test_thoughts_are_relayed_as_they_come(form: Format, opened: bool) -> None:
    text = ("" if opened else "<think>") + "\nso it  is </ that\n\n</think>\n\nyes"
    deltas = in_pieces(form, text, [1] * 99, TOOLS, reasoning_open=opened)
    thoughts = [delta.text for delta in deltas if delta.kind == "reasoning"]
    assert "".join(thoughts) == "so it  is </ that"
    assert len(thoughts) > 8
    assert relayed(deltas) == "yes"


@pytest.mark.parametrize(
    ("template", "vocabulary", "form"),
    [
        ("… <tool_call> …", (), Hermes),
        ("<tool_call>\n<function=' + name", (), Coder),
        ("'<|python_tag|>' + '\"parameters\": '", (), Llama),
        ("<|channel|>analysis", (), Harmony),
        ("nothing", ("<｜tool▁calls▁begin｜>",), DeepSeek),
        ("nothing", (), Hermes),
    ],
)
def test_the_template_says_which_format_it_is(template: str, vocabulary: Any, form: type[Format]) -> None:
    assert type(format_of(template, vocabulary)) is form


@pytest.mark.parametrize(
    ("text", "value"),
    [("{}", {}), ("", {}), ("null", {}), ('{"a":1', '{"a":1'), ("[1]", [1]), ('{"a": 1}', {"a": 1})],
)
def test_arguments_are_read_where_they_can_be(text: str, value: Any) -> None:
    assert arguments_of(text) == value
