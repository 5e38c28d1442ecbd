"""Plug-ins are found by a name in a room's table or as `module:Class`; an unknown name lists the known ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from polar.errors import PolarError, TaskFault


def load(kind: str, table: Mapping[str, str], name: str | None = None, import_path: str | None = None) -> Any:
    """The class that `table[name]` or `import_path` ("module:Class") names. Raises TaskFault, naming `kind`."""
    path = import_path
    if not path:
        if name is None or name not in table:
            raise TaskFault(f"unknown {kind} {name!r}: known are {', '.join(sorted(table))}, or module:Class")
        path = table[name]
    module, _, attribute = path.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise TaskFault(f"{kind} {path!r} cannot be imported: {error}. Write it as module:Class") from error


@contextmanager
def blamed_on(fault: type[PolarError], whose: str) -> Iterator[None]:
    """A plug-in's own exception becomes the fault of whoever wrote it; our faults and the system's pass."""
    try:
        yield
    except (PolarError, OSError):
        raise
    except Exception as error:  # whatever a plug-in raises has an owner
        raise fault(f"{whose} raised {type(error).__name__}: {error}") from error
