"""`polar show` on log files: every turn's fate in words, forks with their first differing token, no token untold."""

from __future__ import annotations

import json

import pytest

from cli.conftest import inside
from peers.session_logs import ScriptedLog


def show(*words):
    done = inside("show", *words)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.fixture
def letters(tokenizer):
    """The id of each single byte in the tokenizer."""
    vocabulary = json.loads((tokenizer / "tokenizer.json").read_text())["model"]["vocab"]
    return lambda text: [vocabulary[letter] for letter in text]


def test_a_fork_is_told_with_the_first_differing_token_decoded(tmp_path, tokenizer, letters):
    script = ScriptedLog(tmp_path)
    first = script.call(letters("q"), letters("abc"))
    script.call(letters("qaXcz"), letters("d"), after=first, source="engine")
    assert "turn 2 forks: at position 2 it has 'X' (id 55), where turn 1 had 'b' (id 65)" in show(
        script.path, "--tokenizer", tokenizer
    )


def test_a_prompt_that_ends_early_forks_into_nothing(tmp_path):
    script = ScriptedLog(tmp_path)
    first = script.call([1], [50, 51])
    script.call([1, 50], [61], after=first)
    assert "turn 2 forks: at position 2 it has nothing, where turn 1 had '⟨51⟩' (id 51)" in show(script.path)


def test_an_edited_history_is_told_by_its_first_differing_token(tmp_path, tokenizer, letters):
    script = ScriptedLog(tmp_path)
    first = script.call(letters("ask"), letters("say"))
    script.call(letters("axe"), letters("d"), like=first)
    said = "turn 2 continues no answer (an edited history, or another conversation): at position 1 it has 'x' (id"
    assert said in show(script.path, "--tokenizer", tokenizer)


def test_excluded_turns_name_their_reason(tmp_path):
    script = ScriptedLog(tmp_path)
    script.call([1], [10], delivered=False)
    script.call([2], [11], auxiliary=True, logprobs=None)
    script.call([3], [12], finish=None, delivered=False)
    shown = show(script.path)
    for words in ("none: undelivered", "none: auxiliary_call", "none: aborted", "stop, undelivered", "never"):
        assert words in shown


def test_tokens_are_spelled_in_context(tmp_path, tokenizer, letters):
    script = ScriptedLog(tmp_path)
    script.call(letters("ask"), letters("say"))
    lines = show(script.path, "--tokens", "--tokenizer", tokenizer).splitlines()
    start = lines.index("── turn 1, trace 0")
    assert lines[start + 1 : start + 3] == ["ask", "say"]


def test_colour_is_for_terminals(tmp_path, tokenizer, letters):
    script = ScriptedLog(tmp_path)
    script.call(letters("ask"), letters("say"), logprobs=[-0.01, -0.5, -9.0])
    words = ["show", str(script.path), "--tokens", "--tokenizer", str(tokenizer)]
    coloured = inside(*words, FORCE_COLOR="1", TERM="xterm", NO_COLOR="").stdout
    assert "\x1b[32ms" in coloured
    assert "\x1b[33ma" in coloured
    assert "\x1b[31my" in coloured
    assert "\x1b" not in show(script.path, "--tokens")


def test_json_has_ids_logprobs_and_texts(tmp_path, tokenizer, letters):
    script = ScriptedLog(tmp_path)
    first = script.call(letters("q"), letters("abc"))
    script.call(letters("qaXcz"), letters("d"), after=first, source="engine")
    document = json.loads(show(script.path, "--json", "--tokenizer", tokenizer))
    assert document["texts"] == [["a", "b", "c"], ["d"]]
    assert document["turns"][0]["logprobs"] == [-0.5, -0.75, -1.0]
    assert document["turns"][1]["fork"]["position"] == 2


def test_a_log_that_was_cut_off_is_shown_as_far_as_it_goes(tmp_path):
    script = ScriptedLog(tmp_path)
    script.call([1], [10])
    script.call([1, 10, 2], [11])
    script.path.write_bytes(script.path.read_bytes()[:-3])
    shown = show(script.path)
    assert "not sealed · torn" in shown
    assert shown.count("rendered") == 2


@pytest.mark.parametrize(("name", "content"), [("a.log", b"nonsense"), ("a.zst", b"nonsense"), ("a.log", b"")])
def test_a_file_that_is_no_log_is_refused_by_name(tmp_path, name, content):
    path = tmp_path / name
    path.write_bytes(content)
    done = inside("show", path)
    assert done.exit_code != 0
    assert name in done.stderr
