"""Which call a request continues: what the wire changes does not fork, what changes the content does."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.chat_templates import STYLES
from polar.protocols import Rendering
from polar.proxy import load_rendering
from polar.proxy.canonical import Answer, Opening
from polar.proxy.conversation import Conversation, gist
from polar.proxy.dialects import DIALECTS
from polar.proxy.rendering.formats import Hermes
from running_proxy import user

OPENAI, ANTHROPIC = DIALECTS["openai_chat"], DIALECTS["anthropic"]
words = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
values = st.recursive(st.none() | st.booleans() | st.integers(-9, 9) | words, lambda inner: st.lists(inner, max_size=2))
calls = st.lists(st.tuples(st.from_regex(r"[a-z]{1,5}", fullmatch=True), st.dictionaries(words, values, max_size=3)))


@st.composite
def answers(draw: st.DrawFn) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": draw(words)}
    if reasoning := draw(words).strip():
        message["reasoning_content"] = reasoning
    if asked := draw(calls):
        message["tool_calls"] = [
            {"id": f"call_{at}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
            for at, (name, arguments) in enumerate(asked)
        ]
    return message


class House:
    """A conversation with calls made and answered."""

    def __init__(self, rendering: Rendering, reasoning: str = "keep") -> None:
        self.rendering = rendering
        self.conversation = Conversation(rendering, reasoning)
        self.calls = 0
        self.sampled = rendering.render([user("sampled")], None)[:9]

    def call(self, messages: list[dict[str, Any]], answer: dict[str, Any], tools: Any = None) -> Any:
        self.calls += 1
        place = self.conversation.place(messages, tools)
        plan = self.conversation.continued(place, messages, tools)
        plan = plan or self.conversation.rendered(place, messages, tools)
        self.conversation.opened(self.calls, place)
        prompt = self.conversation.prompt(self.calls, place, plan)
        self.conversation.sampled(self.calls, self.sampled)
        self.conversation.answered(self.calls, place, answer)
        return prompt


def reparsed(dialect: Any, answer: dict[str, Any]) -> dict[str, Any]:
    """The answer as a client that was given it sends it back."""
    finished = Answer(opening=Opening(id="x", model="m", created=0), message=answer, finish_reason="stop")
    whole = dialect.whole(finished)
    said = whole["choices"][0]["message"] if "choices" in whole else {"role": "assistant", "content": whole["content"]}
    messages = [user("x"), json.loads(json.dumps(said)), user("y")]
    return dialect.parse({"model": "m", "messages": messages}, "").messages[1]


@settings(max_examples=50)
@given(answers())
def test_answers_come_back_through_every_dialect_as_the_same(answer: dict[str, Any]) -> None:
    for dialect in (OPENAI, ANTHROPIC):
        back = reparsed(dialect, answer)
        assert gist(back) == gist(answer)
        assert back.get("reasoning_content") == answer.get("reasoning_content")


def cosmetic(messages: list[dict[str, Any]], draw: st.DrawFn) -> list[dict[str, Any]]:
    """The same conversation, spelt differently."""
    changed = copy.deepcopy(messages)
    named = draw(st.sampled_from(["", "renamed_"]))
    for message in changed:
        if "tool_call_id" in message:
            message["tool_call_id"] = named + message["tool_call_id"]
        if message["content"] and draw(st.booleans()):
            message["content"] += draw(st.sampled_from([" ", "\n"]))
        if draw(st.booleans()) and message["content"]:
            marker = {"cache_control": {"type": "ephemeral"}} if draw(st.booleans()) else {}
            message["content"] = [{"type": "text", "text": message["content"], **marker}]
        elif not message["content"] and draw(st.booleans()):
            message["content"] = None
        if draw(st.booleans()):
            message.pop("reasoning_content", None)
        for call in message.get("tool_calls", []):
            arguments = json.loads(call["function"]["arguments"])
            shuffled = dict(draw(st.permutations(list(arguments.items()))))
            call["function"]["arguments"] = json.dumps(shuffled, indent=draw(st.sampled_from([None, 2])))
            call["id"] = named + call["id"]
    return changed


@settings(max_examples=40)
@given(st.lists(answers(), min_size=1, max_size=4), st.data())
def test_cosmetic_changes_do_not_fork(rendering: Rendering, said: list[dict[str, Any]], data: st.DataObject) -> None:
    house = House(rendering)
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, user("a")]
    for at, answer in enumerate(said):
        replayed = OPENAI.parse({"model": "m", "messages": cosmetic(messages, data.draw)}, "").messages
        prompt = house.call(replayed, answer)
        assert (prompt.source, prompt.expected) == (("continued", at) if at else ("rendered", None))
        messages += [answer, *results(answer), user(f"next {at}")]


def results(answer: dict[str, Any]) -> list[dict[str, Any]]:
    return [
        {"role": "tool", "tool_call_id": call["id"], "content": f"of {at}"}
        for at, call in enumerate(answer.get("tool_calls", []))
    ]


def called(*ids: str, reasoning: str | None = None) -> dict[str, Any]:
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in ids]
    return {"role": "assistant", "content": "", "tool_calls": calls, "reasoning_content": reasoning}


def test_a_result_belongs_to_a_call_whatever_its_name(rendering: Rendering) -> None:
    for ids, source in [(["x", "y"], "continued"), (["", ""], "rendered"), (["y", "x"], "rendered")]:
        house = House(rendering)
        answer, replayed = called("a", "b"), called("x", "y")
        house.call([user("q")], answer)
        told = [user("q"), answer, *results(answer)]
        house.call(told, {"role": "assistant", "content": "so"})
        again = [{**result, "tool_call_id": name} for result, name in zip(results(replayed), ids, strict=True)]
        after = [user("q"), replayed, *again, {"role": "assistant", "content": "so"}, user("more")]
        prompt = house.call(after, answer)
        assert (prompt.source, prompt.expected) == ("continued", 2 if source == "continued" else 1)


def test_of_equal_answers_the_one_with_these_ids_is_continued(rendering: Rendering) -> None:
    house = House(rendering)
    for name in ("a", "b"):
        house.call([user("q")], called(name))
        house.conversation.delivered(house.calls)
    assert house.call([user("q"), called("a"), *results(called("a"))], called("c")).expected == 1
    assert house.call([user("q"), called("z"), *results(called("z"))], called("c")).expected == 2


REMINDED = [*results(called("a")), user("mind the time")]


@pytest.mark.parametrize(
    ("reasoning", "new", "why"),
    [
        ("keep", REMINDED, None),
        ("tool_cycle", REMINDED[:1], None),
        ("tool_cycle", REMINDED, "reasoning"),
        ("template", REMINDED[:1], "reasoning"),
    ],
)
def test_the_policy_decides_what_becomes_of_thinking(
    rendering: Rendering, reasoning: str, new: list[dict[str, Any]], why: str | None
) -> None:
    for thought in ("hm", None):
        house = House(rendering, reasoning)
        first = house.call([user("q")], called("a", reasoning=thought))
        second = house.call([user("q"), called("a"), *new], called("b"))
        assert (second.expected, second.why) == (1, why if thought else None)
        assert (second.source == "continued") == (second.why is None)
        kept = first.ids.tolist() + house.sampled.tolist()
        assert (house.conversation.sequence(2)[: len(kept)].tolist() == kept) or second.why is not None


def test_why_there_is_no_bridge_is_recorded(tmp_path: Path) -> None:
    rendering = load_rendering(STYLES["deepseek_once"].make(tmp_path))
    house = House(rendering)
    house.call([user("q")], called("a"))
    prompt = house.call([user("q"), called("a"), *results(called("a"))], called("b"))
    assert (prompt.source, prompt.why, prompt.expected) == ("rendered", "no_bridge", 1)
    after = [user("q"), called("a"), *results(called("a")), called("b"), user("stop")]
    assert house.call(after, called("c")).source == "continued"


@settings(max_examples=40)
@given(st.lists(answers(), min_size=2, max_size=4), st.data())
def test_changed_content_forks_and_keeps_the_common_ids(
    rendering: Rendering, said: list[dict[str, Any]], data: st.DataObject
) -> None:
    house = House(rendering)
    messages: list[dict[str, Any]] = [user("a")]
    for at, answer in enumerate(said):
        house.call(messages, answer)
        messages = [*messages, answer, user(f"next {at}")]
    at = data.draw(st.integers(0, len(said) - 1))
    edited = copy.deepcopy(messages)
    edited[2 * at + 1]["content"] += "edited"
    place = house.conversation.place(edited, None)
    assert (place.expected or 0) == at
    prompt = house.call(edited, {"role": "assistant", "content": "x"})
    if prompt.source == "rendered":
        whole = rendering.render(edited, None)
        np.testing.assert_array_equal(house.conversation.sequence(house.calls)[: len(whole)], whole)


def test_edited_reasoning_is_an_edit_and_absent_reasoning_is_none(rendering: Rendering) -> None:
    thought = {"role": "assistant", "content": "so", "reasoning_content": "hm"}
    for given_back, source in [("hm", "continued"), (None, "continued"), ("other", "rendered")]:
        house = House(rendering)
        house.call([user("a")], thought)
        replayed = {**thought, "reasoning_content": given_back}
        assert house.call([user("a"), replayed, user("b")], thought).source == source


def test_another_system_prompt_or_other_tools_are_another_conversation(rendering: Rendering) -> None:
    house = House(rendering)
    answer = {"role": "assistant", "content": "x"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    house.call([user("a")], answer, tools)
    replayed = [user("a"), answer, user("b")]
    assert house.call(replayed, answer, tools).source == "continued"
    assert house.call(replayed, answer, None).expected is None
    assert house.call([{"role": "system", "content": "sub"}, *replayed], answer, tools).expected is None
    respelt = [{"function": {"name": "f"}, "type": "function"}]
    assert house.call([*replayed, answer, user("c")], answer, respelt).source == "continued"


def test_equal_prompts_share_their_ids(rendering: Rendering) -> None:
    house = House(rendering)
    first = house.call([user("a")], {"role": "assistant", "content": "x"})
    second = house.call([user("a")], {"role": "assistant", "content": "y"})
    assert (second.base, second.keep, len(second.ids)) == (1, len(first.ids), 0)
    third = house.call([user("a"), {"role": "assistant", "content": "y"}, user("b")], parse("z"))
    assert third.expected == 2


def parse(text: str) -> dict[str, Any]:
    return Hermes().parse(text, None, reasoning_open=False)


@pytest.mark.parametrize("system", ["string", "blocks"])
def test_a_billing_header_that_changes_is_not_the_conversation(system: str) -> None:
    """Case 25."""

    def messages(number: int) -> list[dict[str, Any]]:
        header = f"x-anthropic-billing-header: cc_version=2; cch={number}"
        blocks = [{"type": "text", "text": header}, {"type": "text", "text": "be brief"}]
        written = blocks if system == "blocks" else f"{header}\nbe brief"
        return ANTHROPIC.parse({"model": "m", "system": written, "messages": [user("x")]}, "").messages

    assert messages(1) == messages(2) == [{"role": "system", "content": "be brief"}, user("x")]
