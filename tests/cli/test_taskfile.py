"""A wrong task file names every mistake by line and field, and gives no task."""

from __future__ import annotations

import json

import pytest

from polar.cli.taskfile import TaskFileError, read_tasks
from polar.errors import ConfigError

GOOD = {"task_id": "a", "instruction": "do it", "agent": {"harness": "mini_swe_agent"}}


def written(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def mistakes_of(path):
    with pytest.raises(TaskFileError) as caught:
        read_tasks(path)
    assert str(path) in caught.value.message
    return [str(mistake) for mistake in caught.value.mistakes]


def test_jsonl_reads_one_task_a_line(tmp_path):
    lines = [json.dumps(GOOD | {"task_id": name}) for name in ("a", "b")]
    path = written(tmp_path, "tasks.jsonl", "\n\n".join(lines))
    assert [task.task_id for task in read_tasks(path).tasks] == ["a", "b"]


@pytest.mark.parametrize(
    "text",
    [
        "task_id: a\ninstruction: do it\nagent: {harness: mini_swe_agent}\n",
        "- {task_id: a, instruction: do it, agent: {harness: mini_swe_agent}}\n",
        "tasks:\n  - {task_id: a, instruction: do it, agent: {harness: mini_swe_agent}}\n",
    ],
)
def test_yaml_is_one_task_a_list_or_tasks(tmp_path, text):
    assert [task.task_id for task in read_tasks(written(tmp_path, "t.yaml", text)).tasks] == ["a"]


@pytest.mark.parametrize("document", [GOOD, [GOOD], {"tasks": [GOOD]}])
def test_json_has_the_same_forms(tmp_path, document):
    assert read_tasks(written(tmp_path, "t.json", json.dumps(document))).tasks[0].instruction == "do it"


def test_every_mistake_is_named_by_line_and_field(tmp_path):
    lines = [
        json.dumps(GOOD),
        json.dumps(GOOD | {"task_id": "b", "num_samples": 0}),
        "{not json",
        json.dumps(GOOD | {"task_id": "c", "timeout_seconds": "abc", "agent": {"harness": "shell"}}),
        '{"task_id": "d", "instruction": "x", "agent": {"harness": "pi"}, "timeout_seconds": NaN}',
        json.dumps(GOOD | {"task_id": "e", "instruction": " "}),
        json.dumps(["a", "list"]),
    ]
    mistakes = mistakes_of(written(tmp_path, "tasks.jsonl", "\n".join(lines)))
    assert [mistake.split(": ")[0] for mistake in mistakes] == [
        "line 3",
        "line 2",
        "line 4",
        "line 4",
        "line 5",
        "line 6",
        "line 7",
    ]
    text = "\n".join(mistakes)
    for part in (
        "line 2: num_samples: ",
        "line 3: not JSON",
        "line 4: timeout_seconds: ",
        "line 4: agent: harness 'shell' needs custom_shell",
        "line 5: timeout_seconds: Input should be a finite number",
        "instruction is empty",
        "line 7: a task is a mapping of fields, not list",
    ):
        assert part in text


@pytest.mark.parametrize("timeout", [0, -1, "abc"])
def test_impossible_timeouts_are_refused_by_name(tmp_path, timeout):
    path = written(tmp_path, "t.jsonl", json.dumps(GOOD | {"timeout_seconds": timeout}))
    assert mistakes_of(path)[0].startswith("line 1: timeout_seconds: ")


def test_yaml_mistakes_have_the_line_where_their_task_starts(tmp_path):
    text = "tasks:\n  - task_id: a\n    instruction: x\n    agent: {harness: pi}\n  - task_id: b\n    instruction: x\n"
    assert mistakes_of(written(tmp_path, "t.yaml", text)) == ["line 5: agent: is missing"]


def test_broken_yaml_has_its_line(tmp_path):
    assert mistakes_of(written(tmp_path, "t.yaml", "task_id: a\n  b: [\n"))[0].startswith("line 2: not YAML: ")


def test_an_id_used_twice_names_both_lines(tmp_path):
    path = written(tmp_path, "t.jsonl", f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n")
    assert mistakes_of(path) == ["line 2: task_id: 'a' is the id of line 1 already"]


def test_a_misspelt_field_is_a_warning_with_the_field_that_was_meant(tmp_path):
    path = written(
        tmp_path, "t.jsonl", json.dumps({"num_sample": 4} | GOOD | {"agent": {"harness": "pi", "modle": "x"}})
    )
    assert read_tasks(path).warnings == [
        "line 1: num_sample is ignored: did you mean num_samples?",
        "line 1: agent.modle is ignored: no task has such a field",
    ]


def test_a_misspelt_required_field_is_named_in_the_mistake(tmp_path):
    raw = {("instructions" if key == "instruction" else key): value for key, value in GOOD.items()}
    path = written(tmp_path, "t.jsonl", json.dumps(raw))
    assert mistakes_of(path) == ["line 1: instruction: is missing (is 'instructions' meant to be it?)"]


@pytest.mark.parametrize("name", ["t.jsonl", "t.yaml"])
def test_an_empty_file_says_what_a_task_file_is(tmp_path, name):
    assert "no task in it" in mistakes_of(written(tmp_path, name, ""))[0]


def test_jsonl_under_a_json_name_says_how_to_name_it(tmp_path):
    path = written(tmp_path, "t.json", f"{json.dumps(GOOD)}\n{json.dumps(GOOD)}\n")
    assert "name the file .jsonl" in mistakes_of(path)[0]


@pytest.mark.parametrize(("name", "content"), [("t.txt", b"x"), ("t.jsonl", b"\xff\xfe\x00"), ("missing.jsonl", None)])
def test_unreadable_files_say_why(tmp_path, name, content):
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigError, match=name):
        read_tasks(path)


def test_an_instruction_of_a_megabyte_is_a_task(tmp_path):
    path = written(tmp_path, "t.jsonl", json.dumps(GOOD | {"instruction": "x" * 1_000_000}))
    assert len(read_tasks(path).tasks[0].instruction) == 1_000_000
