"""Forms that an answer can be held to, as formats of structural tags, which the grammars of engines read.

JSON of a schema, or one tool call in the markup of the model's own format, behind the reasoning where the prompt has
opened it.
"""

from __future__ import annotations

from typing import Any

from polar.proxy.rendering.parsing import END_THINK, CallForm, Tools

Grammar = dict[str, Any]


def grammar(
    schema: dict[str, Any] | None, tools: Tools, form: CallForm | None, *, reasoning_open: bool
) -> Grammar | None:
    """`form` None: a format whose calls cannot be written down this way, and then so is their grammar."""
    if tools and form is None:
        return None
    choices = [] if schema is None else [_json(schema)]
    choices += [_call(tool["function"], form) for tool in tools or [] if form is not None]
    answer = choices[0] if len(choices) == 1 else {"type": "or", "elements": choices}
    return {"type": "sequence", "elements": [_THOUGHTS, answer]} if reasoning_open else answer


_THOUGHTS: Grammar = {"type": "tag", "begin": "", "content": {"type": "any_text"}, "end": END_THINK + "\n\n"}


def _call(function: dict[str, Any], form: CallForm) -> Grammar:
    begin = form.before_name + function["name"] + form.before_arguments
    return {"type": "tag", "begin": begin, "content": _json(function["parameters"]), "end": form.end}


def _json(schema: Any) -> Grammar:
    return {"type": "json_schema", "json_schema": schema}
