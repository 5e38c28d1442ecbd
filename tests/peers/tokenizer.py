"""A small tokenizer in the usual layout: bytes, a few merges (so that "hello" may be one token or two), ChatML."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
MERGES = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]

CHATML = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n' }}{% endif %}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n[result]' + message.content + '[/result]' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments if call.function.arguments is string else call.function.arguments | tojson) }}
{{- '}</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not (loop.first and message.role == 'system') %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""


def make_tokenizer(folder: Path, template: str = CHATML) -> Path:
    letters = sorted(ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    for left, right in MERGES:
        vocabulary[left + right] = len(vocabulary)
    tokenizer = Tokenizer(BPE(vocabulary, MERGES))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in MARKUP])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
