"""Placeholders `{a.b.c}` in a task template: dotted paths over what the bridge knows, and nothing that runs code.

A string that is exactly one placeholder keeps the object's type; inside a longer string None is "". `{{name}}` is the
text `{name}`; braces around anything but a dotted name are left alone. An unknown path is an error that names it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from polar.errors import ConfigError

_PATH = r"[A-Za-z_]\w*(?:\.\w+)*"
_ONE = re.compile(rf"\{{({_PATH})\}}")
_ANY = re.compile(rf"\{{\{{({_PATH})\}}\}}|\{{({_PATH})\}}")


def render(template: Any, names: Mapping[str, Any], where: str) -> Any:
    """`template` with its strings filled in, at any depth. `where` is the configuration key that errors name."""
    if isinstance(template, Mapping):
        return {key: render(value, names, f"{where}.{key}") for key, value in template.items()}
    if isinstance(template, list | tuple):
        return [render(value, names, f"{where}.{position}") for position, value in enumerate(template)]
    return _render_text(template, names, where) if isinstance(template, str) else template


def _render_text(text: str, names: Mapping[str, Any], where: str) -> Any:
    if single := _ONE.fullmatch(text):
        return look_up(single[1], names, where)

    def fill(match: re.Match[str]) -> str:
        if match[1] is not None:
            return f"{{{match[1]}}}"
        value = look_up(match[2], names, where)
        return "" if value is None else str(value)

    return _ANY.sub(fill, text)


def placeholders(template: Any, where: str) -> Iterator[tuple[str, str]]:
    """Every path that `template` names, with the key under which it stands."""
    if isinstance(template, Mapping):
        for key, value in template.items():
            yield from placeholders(value, f"{where}.{key}")
    elif isinstance(template, list | tuple):
        for position, value in enumerate(template):
            yield from placeholders(value, f"{where}.{position}")
    elif isinstance(template, str):
        yield from ((match[2], where) for match in _ANY.finditer(template) if match[2] is not None)


def look_up(path: str, names: Mapping[str, Any], where: str) -> Any:
    """Raises ConfigError naming `where`, the path and what there is in its stead."""
    value: Any = names
    for step in path.split("."):
        if isinstance(value, Mapping) and step in value:
            value = value[step]
        elif isinstance(value, list | tuple) and step.isdigit() and int(step) < len(value):
            value = value[int(step)]
        elif not isinstance(value, Mapping) and not step.startswith("_") and hasattr(value, step):
            value = getattr(value, step)
        else:
            known = (
                f"it has {', '.join(map(str, value)) or 'nothing'}"
                if isinstance(value, Mapping)
                else "no such attribute"
            )
            raise ConfigError(f"{where}: unknown placeholder {{{path}}}: at {step!r}, {known}")
    return value
