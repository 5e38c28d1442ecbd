"""Chat templates: a bridge is what one-shot rendering gives, or it is refused."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peers.chat_templates import STYLES
from peers.tokenizer import CHATML, make_tokenizer
from polar.errors import ConfigError, TaskFault
from polar.protocols import Rendering
from polar.proxy import load_rendering
from running_proxy import user

TOOLS = [{"type": "function", "function": {"name": "bash", "description": "", "parameters": {"type": "object"}}}]


def tool(text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": "c", "content": text}


def asked(arguments: Any) -> dict[str, Any]:
    function = {"name": "bash", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


CONTINUATIONS = [
    [user("b")],
    [tool("1")],
    [tool("1"), tool("2")],
    [tool("1"), tool("2"), tool("3<|im_end|>\n")],
    [tool("1"), user("b"), tool("2")],
    [tool("stand-in turn 4c1f"), {"role": "system", "content": "reminder"}],
]


def answered(rendering: Rendering, messages: list[dict[str, Any]], answer: dict[str, Any]) -> np.ndarray:
    """The sequence as it is when the policy has sampled this answer: prompt, text and end of turn."""
    prompt = rendering.render(messages, TOOLS)
    # Templates may write the last answer of a conversation in another way.
    whole = rendering.render([*messages, answer, user("more")], TOOLS)
    end = rendering.stop_ids[0]
    return whole[: len(prompt) + int(np.flatnonzero(whole[len(prompt) :] == end)[0]) + 1]


@pytest.mark.parametrize("new", CONTINUATIONS)
@pytest.mark.parametrize("answer", [{"role": "assistant", "content": "hello é"}, asked('{"cmd": "ls"}')])
def test_bridges_equal_one_shot_rendering(
    rendering: Rendering, answer: dict[str, Any], new: list[dict[str, Any]]
) -> None:
    """Cases 7 and 8."""
    messages = [{"role": "system", "content": "be brief"}, user("a")]
    sequence = answered(rendering, messages, answer)
    added = rendering.bridge(sequence, new, TOOLS, sampled=9)
    one_shot = rendering.render([*messages, answer, *new], TOOLS)
    np.testing.assert_array_equal(np.concatenate([sequence, added]), one_shot)


def test_the_end_of_turn_is_supplied_once(rendering: Rendering) -> None:
    sequence = answered(rendering, [user("a")], {"role": "assistant", "content": "cut"})
    whole = rendering.bridge(sequence, [user("b")], None, sampled=9)
    np.testing.assert_array_equal(
        rendering.bridge(sequence[:-1], [user("b")], None, sampled=4), np.concatenate([sequence[-1:], whole])
    )
    with_newline = np.concatenate([sequence, whole[:1]])
    np.testing.assert_array_equal(rendering.bridge(with_newline, [user("b")], None, sampled=9), whole[1:])


def test_a_template_that_walks_arguments_gets_a_map(tmp_path: Path) -> None:
    walking = CHATML.replace("call.function.arguments if", "call.function.arguments.items() | list | tojson if")
    walking = walking.replace("call.function.arguments | tojson", "call.function.arguments.items() | list | tojson")
    rendering = load_rendering(make_tokenizer(tmp_path, walking))
    for arguments in ('{"a":1', "[1]"):
        assert "arguments" in rendering.decode(rendering.render([user("a"), asked(arguments), tool("1")], None))


MOVES_TOOLS = """\
{%- for message in messages %}
{%- if tools and loop.last %}{{ tools | tojson }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""
COUNTS = "{% for message in messages %}" + "{{ message.content }}<|im_end|>{{ messages | length }}{% endfor %}"
ALTERNATES = """\
{%- for message in messages %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def test_templates_that_are_not_prefix_stable_give_no_bridge(tmp_path: Path) -> None:
    moving = load_rendering(make_tokenizer(tmp_path / "moving", MOVES_TOOLS))
    sequence = moving.render([user("a")], TOOLS)
    assert moving.bridge(sequence, [user("b")], TOOLS, sampled=0) is None
    counting = load_rendering(make_tokenizer(tmp_path / "counting", COUNTS))
    assert counting.bridge(sequence, [user("b")], None, sampled=0) is None


def test_the_loop_goes_on_while_a_long_prompt_is_encoded(rendering: Rendering) -> None:
    """Case 38: the encoder gives the interpreter away."""

    async def turns_of_the_loop() -> int:
        task = asyncio.create_task(asyncio.to_thread(rendering.render, [user("hello there " * 60_000)], None))
        turns = 0
        while not task.done():
            await asyncio.sleep(0.001)
            turns += 1
        return turns

    assert asyncio.run(turns_of_the_loop()) > 20


def test_a_template_that_writes_the_time_is_bridged_whenever_it_is(tmp_path: Path) -> None:
    rendering = load_rendering(make_tokenizer(tmp_path, "{{ strftime_now('%S') }}" + CHATML))
    at_start, deadline = rendering.render([user("a")], None), time.monotonic() + 10
    while np.array_equal(rendering.render([user("a")], None), at_start):
        assert time.monotonic() < deadline, "the second does not change"
    # A second may end between two looks at the clock, but not time and again.
    tries = (rendering.bridge(at_start, [user("b")], TOOLS, sampled=0) for _ in range(5))
    assert any(added is not None for added in tries)


def test_a_system_message_that_is_refused_in_the_middle_is_the_users_there(tmp_path: Path) -> None:
    rendering = load_rendering(STYLES["llama"].make(tmp_path))
    messages = [user("a"), {"role": "assistant", "content": "b"}, {"role": "system", "content": "mind the time"}]
    text = rendering.decode(rendering.render(messages, None))
    assert "<|start_header_id|>user<|end_header_id|>\n\nmind the time<|eot_id|>" in text


def test_what_a_template_refuses_is_the_conversations_fault(tmp_path: Path) -> None:
    strict = load_rendering(make_tokenizer(tmp_path, ALTERNATES))
    with pytest.raises(TaskFault, match="roles must alternate"):
        strict.render([user("a"), user("b")], None)
    assert strict.bridge(strict.render([user("a")], None), [tool("x")], None, sampled=0) is None


def test_a_folder_that_cannot_be_used_names_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_rendering(tmp_path)
    folder = make_tokenizer(tmp_path / "made", "{% if %}")
    with pytest.raises(ConfigError, match="chat template"):
        load_rendering(folder)
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="no chat template"):
        load_rendering(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_rendering(folder)


def test_templates_may_use_what_their_authors_expect(tmp_path: Path) -> None:
    template = (
        "{{ bos_token }}{% for message in messages %}{% if loop.index > 9 %}{% break %}{% endif %}"
        "{% generation %}{{ message.content | tojson }}{% endgeneration %}{% endfor %}{{ strftime_now('%Y')[:1] }}"
    )
    folder = make_tokenizer(tmp_path, "")
    config = {"bos_token": {"content": "<|im_start|>"}, "chat_template": [{"name": "default", "template": template}]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    rendering = load_rendering(folder)
    assert rendering.decode(rendering.render([user("é")], None)) == '<|im_start|>"é"2'
