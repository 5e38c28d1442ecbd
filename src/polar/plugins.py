"""Plug-ins are found by a name in a room's table or as `module:Class`; an unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from polar.errors import TaskFault


def load(kind: str, table: Mapping[str, str], name: str | None = None, import_path: str | None = None) -> Any:
    """The class that `table[name]` or `import_path` ("module:Class") names. Raises TaskFault, naming `kind`."""
    path = import_path
    if path is None:
        if name is None or name not in table:
            raise TaskFault(f"unknown {kind} {name!r}: known are {', '.join(sorted(table))}, or module:Class")
        path = table[name]
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskFault(f"{kind} {path!r} cannot be imported: {error}. Write it as module:Class") from error
