"""The words that the small policy knows, and how a conversation is written in them.

A token is a whole word between spaces. The chat template is prefix-stable: what `messages[:n]` renders to is a prefix
of what `messages[:n + 1]` renders to, and an assistant's text is always followed by `<end>`, the token that ends a
turn.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jinja2 import Template
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

PAD, UNKNOWN, END, ASSISTANT = "<pad>", "<unk>", "<end>", "<assistant>"
SPECIAL = [PAD, UNKNOWN, END, "<system>", "<user>", ASSISTANT, "<tool>"]
_FUNCTION = """
in what is ? read = ; no such file answer error : not found the a of to and
"""
_TREES = """
alder ash aspen balsa bamboo banyan baobab beech birch box buckeye cacao cashew cedar cherry citron cypress ebony
elder elm fig fir ginkgo gum hawthorn hazel hemlock hickory holly juniper kapok larch laurel lemon lilac lime linden
locust mahogany mango maple medlar mulberry myrtle oak olive osier palm pear pecan pine plane plum poplar quince
rowan spruce sumac teak willow
"""
_SETTINGS = """
access address agent alias backup bind branch buffer bucket cache channel cluster codec colour cookie cursor
database device digest domain driver editor encoding engine format gateway group host index issuer label language
level locale logger mirror mode mount network origin owner palette parser peer pool port prefix profile protocol
proxy queue realm region relay router schema secret shell socket theme
"""
_NOUNS = """
amber anchor apple arrow badger banjo basil beacon bishop bison breeze bronze canyon carbon castle cobalt comet
copper coral cotton crane crater dagger dahlia delta desert dragon eagle ember falcon feather flint forest fossil
garnet geyser glacier granite harbor harvest heron honey indigo iris island ivory jade jaguar jasper kettle lagoon
lantern lava lotus lynx magnet marble meadow meteor mint nectar nickel onyx orchid otter panther pepper pilot
prairie quartz raven reef saddle saffron sierra thunder topaz tulip velvet violet walrus zephyr
"""
FILES = [f"{tree}.ini" for tree in _TREES.split()]
KEYS, VALUES = _SETTINGS.split(), _NOUNS.split()
WORDS = SPECIAL + _FUNCTION.split() + FILES + KEYS + VALUES

CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- set role = 'system' if message.role == 'developer' else message.role -%}
{{- '<' ~ role ~ '> ' -}}
{%- if message.content is string -%}{{- message.content -}}
{%- elif message.content -%}
{%- for part in message.content -%}{{- part.text | default('') ~ ' ' -}}{%- endfor -%}
{%- endif -%}
{{- ' <end> ' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<assistant> ' -}}{%- endif -%}
"""
_TEMPLATE = Template(CHAT_TEMPLATE)


def tokenizer() -> Tokenizer:
    """One id a word, in the order of WORDS; a word that is not there becomes `<unk>`."""
    made = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token=UNKNOWN))
    made.pre_tokenizer = WhitespaceSplit()
    made.add_special_tokens(SPECIAL)
    return made


def render(messages: list[dict[str, Any]], *, add_generation_prompt: bool) -> str:
    """The text of a conversation, as every chat-template renderer writes it."""
    return _TEMPLATE.render(messages=messages, add_generation_prompt=add_generation_prompt)


def save_tokenizer(folder: Path) -> None:
    """Write `tokenizer.json` and `tokenizer_config.json` (with the chat template), in Hugging Face's layout."""
    tokenizer().save(str(folder / "tokenizer.json"))
    names = {"pad_token": PAD, "unk_token": UNKNOWN, "eos_token": END}
    config = names | {"chat_template": CHAT_TEMPLATE, "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))
