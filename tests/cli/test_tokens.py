"""Tokens for people: one line, every id shown, a colour that follows the logprob."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers

from polar.cli.tokens import decoder, sampled, style, visible
from polar.errors import ConfigError


def tokenizer_folder(folder):
    tokenizer = Tokenizer(models.WordLevel({"read": 0, "file": 1, "<end>": 2}, unk_token="<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_special_tokens_are_spelled_out(tmp_path):
    decode = decoder(tokenizer_folder(tmp_path))
    assert decode([0, 1, 2]) == ["read", " file", " <end>"]
    assert decode([1]) == ["file"]
    assert decode([]) == []


def test_without_a_tokenizer_ids_stand_for_themselves():
    assert sampled([5, 7], None, True, decoder(None)).plain == "⟨5⟩⟨7⟩"


@pytest.mark.parametrize("content", [None, "{}", "not json"])
def test_a_folder_without_a_usable_tokenizer_is_named(tmp_path, content):
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        decoder(tmp_path)


@pytest.mark.parametrize(
    ("logprob", "colour"), [(0.0, "green"), (-0.5, "yellow"), (-2.0, "dark_orange"), (-9.0, "red")]
)
def test_the_colour_follows_the_logprob(logprob, colour):
    assert style(logprob, trained=True) == colour
    assert style(logprob, trained=False) == f"{colour} dim strike"


@pytest.mark.parametrize("missing", [None, float("nan"), float("-inf")])
def test_a_missing_logprob_has_a_colour_of_its_own(missing):
    assert style(missing, trained=True) == "magenta"


@given(st.text())
def test_a_token_never_breaks_the_line_or_moves_the_cursor(text):
    assert visible(text).isprintable()


@given(st.lists(st.integers(0, 150_000), max_size=30))
def test_every_sampled_id_is_shown(ids):
    shown = sampled(ids, list(np.zeros(len(ids))), True, decoder(None))
    assert shown.plain == "".join(f"⟨{token}⟩" for token in ids)
