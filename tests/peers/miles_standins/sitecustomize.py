"""Lets miles-rl be imported with nothing beside it but torch: packages that are not installed are empty ones, of whose
things nothing can be done but name, subclass or decorate with them."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

SERVING = {"ray", "sglang", "sglang_router", "pybase64", "orjson"}
TRAINING = {"transformers", "megatron", "wandb", "datasets", "pylatexenc"}
ABSENT = SERVING | TRAINING


class Nothing(type):
    """A class; its attributes are such classes, and it decorates without changing anything."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        return arguments[0] if arguments and not options and callable(arguments[0]) else cls


class Absent(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing(name, (), {})


class Finder(MetaPathFinder, Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        made = Absent(spec.name)
        made.__path__ = []
        return made

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing in it."""


sys.meta_path.insert(0, Finder())
