"""The tasks can be solved only by reading, and conversations are written so that turns can be continued."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar_demo.tasks import FILES_IN_FOLDER, files_for, look_up, tool_result
from polar_demo.vocabulary import ASSISTANT, END, WORDS, render, tokenizer

SEEDS = st.integers(0, 2**63)
WORD = st.sampled_from([word for word in WORDS if not word.startswith("<")])
MESSAGE = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
        "content": st.lists(WORD, max_size=6).map(" ".join),
    }
)


@given(SEEDS)
def test_only_the_file_that_was_asked_for_has_the_answer(seed: int) -> None:
    task = look_up(seed)
    assert task == look_up(seed)
    assert files_for(seed) == task.files
    assert len(task.files) == FILES_IN_FOLDER
    assert f"{task.answer} ;" in tool_result(task.files, task.command)
    values = [
        line.split()[2] for text in task.files.values() for line in text.splitlines() if line.startswith(task.key)
    ]
    assert len(values) == FILES_IN_FOLDER
    assert values.count(task.value) < FILES_IN_FOLDER / 3


@given(SEEDS)
def test_every_word_of_a_task_is_known(seed: int) -> None:
    task = look_up(seed)
    text = " ".join([task.instruction, task.command, task.answer, *task.files.values()])
    assert all(word in WORDS for word in text.split())


def test_a_file_that_is_not_there_is_an_answer_of_known_words() -> None:
    for said in ("", "read", "read nothing.ini", "read ../alder.ini", "write alder.ini now"):
        assert all(word in WORDS for word in tool_result({"alder.ini": "x"}, said).split())


@given(st.lists(MESSAGE, min_size=1, max_size=6))
def test_the_chat_template_is_prefix_stable(messages: list[dict[str, str]]) -> None:
    whole = _ids(messages, generate=False)
    for count in range(len(messages)):
        before = _ids(messages[:count], generate=messages[count]["role"] == "assistant")
        assert whole[: len(before)] == before
    assert whole.count(WORDS.index(END)) == len(messages)


@given(st.lists(WORD, min_size=1, max_size=9))
def test_what_was_sampled_is_rendered_again_as_the_same_ids(words: list[str]) -> None:
    user = {"role": "user", "content": "what ?"}
    sampled = [WORDS.index(word) for word in [*words, END]]
    said = tokenizer().decode(sampled)
    again = _ids([user, {"role": "assistant", "content": said}], generate=False)
    assert again == _ids([user], generate=True) + sampled


def test_text_in_parts_and_missing_text_are_understood() -> None:
    parts = [{"role": "user", "content": [{"type": "text", "text": "in"}, {"type": "text", "text": "what ?"}]}]
    assert _ids(parts, generate=True) == _ids([{"role": "user", "content": "in what ?"}], generate=True)
    assert render([{"role": "assistant", "content": None}], add_generation_prompt=False).split() == [ASSISTANT, END]


def test_ids_are_unique() -> None:
    assert len(set(WORDS)) == len(WORDS) == tokenizer().get_vocab_size()


def _ids(messages: list[dict], *, generate: bool) -> list[int]:
    return tokenizer().encode(render(messages, add_generation_prompt=generate)).ids
