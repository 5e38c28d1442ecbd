"""Stands in for SGLang's CUDA kernels: every name can be imported, also from modules below, and raises when called."""

import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

__version__ = "0.4.10"


def __getattr__(name: str) -> MagicMock:
    if name.startswith("__"):
        raise AttributeError(name)
    return MagicMock(name=name, side_effect=RuntimeError(f"there is no kernel {name} on a CPU"))


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> MagicMock:
        return __getattr__(name)


class _Modules(MetaPathFinder, Loader):
    def find_spec(self, name, path, target=None):
        return ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Modules())
