"""Chat templates of our own in the style of families of models, each over the small tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
from tokenizers import AddedToken, Tokenizer

from peers.tokenizer import make_tokenizer

QWEN = """\
{%- set told = messages[0].content if messages[0].role == 'system' else '' %}
{%- if tools or told %}
{{- '<|im_start|>system\\n' + told }}
{%- for tool in tools or [] %}{{- '\\n' + tool | tojson }}{%- endfor %}
{{- '\\nAnswer with <tool_call> to call one.<|im_end|>\\n' }}
{%- endif %}
{%- set seen = namespace(asked=0) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set seen.asked = loop.index0 %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{- '<|im_start|>user' }}{% endif %}
{{- '\\n[result]\\n' + message.content + '\\n[/result]' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{- '<|im_end|>\\n' }}{% endif %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' }}
{%- if message.reasoning_content and loop.index0 > seen.asked or loop.last %}
{{- '<think>\\n' ~ message.reasoning_content | default('') ~ '\\n</think>\\n\\n' }}
{%- endif %}
{{- message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif not loop.first or message.role != 'system' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

OPEN_THINKING = QWEN.replace(
    "{{- '<|im_start|>assistant\\n' }}{% endif %}", "{{- '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
)

CODER = """\
{%- if tools %}
{{- '<|im_start|>system\\nCall with <function=name>.' }}
{%- for tool in tools %}{{- '\\n' + tool.function.name }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + ('user' if message.role == 'tool' else message.role) + '\\n' + message.content }}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n<function=' + call.function.name + '>\\n' }}
{%- for name, value in call.function.arguments | items %}
{{- '<parameter=' + name + '>\\n' + (value if value is string else value | tojson) + '\\n</parameter>\\n' }}
{%- endfor %}
{{- '</function>\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

LLAMA = """\
{{- bos_token + '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for tool in tools or [] %}{{- tool | tojson + '\\n' }}{% endfor %}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- if message.role == 'system' and not loop.first %}{{- raise_exception('a system message comes first') }}{% endif %}
{%- if message.tool_calls and message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
{%- if message.tool_calls %}
{{- '{"name": "' + message.tool_calls[0].function.name + '", "parameters": ' }}
{{- message.tool_calls[0].function.arguments | tojson + '}' }}
{%- else %}
{{- message.content | trim }}
{%- endif %}
{{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}
"""

DEEPSEEK = """\
{{- bos_token }}
{%- for message in messages if message.role == 'system' %}{{- message.content + '\\n' }}{% endfor %}
{%- for tool in tools or [] %}{{- tool.function.name + '\\n' }}{% endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}{{- '<｜User｜>' + message.content + '<｜Assistant｜>' }}{% endif %}
{%- if message.role == 'tool' %}
{{- '<｜tool▁output▁begin｜>' + message.content + '<｜tool▁output▁end｜>' }}
{%- endif %}
{%- if message.role == 'assistant' %}
{%- if message.content is not none %}{{- message.content.split('</think>') | last }}{% endif %}
{%- if message.content is none %}
{{- '<｜tool▁calls▁begin｜>' }}
{%- for call in message.tool_calls %}
{{- '<｜tool▁call▁begin｜>' + call.function.name + '<｜tool▁sep｜>' + call.function.arguments + '<｜tool▁call▁end｜>' }}
{%- endfor %}
{{- '<｜tool▁calls▁end｜>' }}
{%- endif %}
{{- eos_token }}
{%- endif %}
{%- endfor %}
"""

# The first tool result of a conversation has another opening than the later ones.
DEEPSEEK_ONCE = DEEPSEEK.replace(
    "{{- '<｜tool▁output▁begin｜>'",
    "{{- ('first ' if (messages | selectattr('role', 'equalto', 'tool') | list)[0] is sameas message else '')"
    " + '<｜tool▁output▁begin｜>'",
)

SMALL = """\
{%- if messages[0].role != 'system' %}{{- '<|im_start|>system\\nYou help.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{% endif %}
"""

HARMONY = """\
{{- '<|start|>system<|message|>Channels: analysis, commentary, final.<|end|>' }}
{%- if tools %}
{{- '<|start|>developer<|message|>' }}
{%- for tool in tools %}{{- 'type ' + tool.function.name + ';\\n' }}{% endfor %}
{{- '<|end|>' }}
{%- endif %}
{%- set last = namespace(call=none) %}
{%- for message in messages %}
{%- if message.role == 'assistant' and message.tool_calls %}
{%- if message.tool_calls | length > 1 %}{{- raise_exception('one call at a time') }}{% endif %}
{%- set last.call = message.tool_calls[0].function %}
{%- if message.reasoning_content and loop.nextitem is defined and loop.nextitem.role == 'tool' %}
{{- '<|start|>assistant<|channel|>analysis<|message|>' + message.reasoning_content + '<|end|>' }}
{%- endif %}
{{- '<|start|>assistant to=functions.' + last.call.name + '<|channel|>commentary json<|message|>' }}
{{- last.call.arguments | tojson + '<|call|>' }}
{%- elif message.role == 'assistant' %}
{{- '<|start|>assistant<|channel|>final<|message|>' + message.content }}
{{- '<|return|>' if loop.last and not add_generation_prompt else '<|end|>' }}
{%- elif message.role == 'tool' %}
{%- if last.call is none %}{{- raise_exception('a result without a call') }}{% endif %}
{{- '<|start|>functions.' + last.call.name + ' to=assistant<|channel|>commentary<|message|>' }}
{{- message.content + '<|end|>' }}
{%- else %}
{%- set role = 'developer' if message.role == 'system' else message.role %}
{{- '<|start|>' + role + '<|message|>' + message.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start|>assistant' }}{% endif %}
"""


class Style(msgspec.Struct, kw_only=True, frozen=True):
    """`never`: roles of messages that the template lets nobody bridge; `calls`: how many a turn may have."""

    template: str
    special: tuple[str, ...] = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
    markup: tuple[str, ...] = ("<tool_call>", "</tool_call>", "<think>", "</think>")
    bos: str = ""
    eos: str = "<|im_end|>"
    never: frozenset[str] = frozenset()
    calls: int = 3
    calls_written: bool = True

    def make(self, folder: Path) -> Path:
        make_tokenizer(folder, self.template)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        tokenizer.add_special_tokens(list(self.special))
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in self.markup])
        tokenizer.save(str(folder / "tokenizer.json"))
        config = {"bos_token": self.bos, "eos_token": self.eos, "chat_template": self.template}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        return folder


_LLAMA = tuple(
    f"<|{name}|>" for name in ("begin_of_text", "start_header_id", "end_header_id", "eot_id", "eom_id", "python_tag")
)
_DEEPSEEK_MARKUP = (
    "<｜User｜>",
    "<｜Assistant｜>",
    "<｜tool▁sep｜>",
    *(f"<｜tool▁{what}▁{end}｜>" for what in ("calls", "call", "output") for end in ("begin", "end")),
)
_SENTENCE = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")
_HARMONY = tuple(f"<|{name}|>" for name in ("start", "end", "message", "channel", "constrain", "return", "call"))

STYLES = {
    "qwen": Style(template=QWEN),
    "open_thinking": Style(template=OPEN_THINKING),
    "coder": Style(template=CODER),
    "llama": Style(template=LLAMA, special=_LLAMA, bos=_LLAMA[0], eos="<|eot_id|>", calls=1),
    "deepseek": Style(
        template=DEEPSEEK,
        special=_SENTENCE,
        markup=_DEEPSEEK_MARKUP,
        bos=_SENTENCE[0],
        eos=_SENTENCE[1],
        never=frozenset({"system"}),
    ),
    "deepseek_once": Style(
        template=DEEPSEEK_ONCE,
        special=_SENTENCE,
        markup=_DEEPSEEK_MARKUP,
        bos=_SENTENCE[0],
        eos=_SENTENCE[1],
        never=frozenset({"system", "tool"}),
    ),
    "small": Style(template=SMALL, calls_written=False),
    "harmony": Style(template=HARMONY, special=_HARMONY, eos="<|return|>", calls=1),
}

CALLS = {
    "qwen": '<tool_call>\n{"name": "bash", "arguments": {"cmd": "ls"}}\n</tool_call>',
    "coder": "<tool_call>\n<function=bash>\n<parameter=cmd>\nls\n</parameter>\n</function>\n</tool_call>",
    "llama": '{"name": "bash", "parameters": {"cmd": "ls"}}',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>bash<｜tool▁sep｜>"
    '{"cmd": "ls"}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "harmony": '<|channel|>commentary to=functions.bash <|constrain|>json<|message|>{"cmd": "ls"}',
}
"""How a policy of each style calls a tool."""
