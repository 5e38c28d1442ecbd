"""Fixtures of a real proxy over a scripted engine."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import RunningProxy, chat_proxy, engine, proxy, rendering, running_proxy, tokenizer

__all__ = ["chat_proxy", "engine", "patient", "proxy", "rendering", "tokenizer"]


@pytest.fixture
def patient(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    """One whose grace does not end while a test runs."""
    with running_proxy(tmp_path, engine.url, rendering, grace_seconds=30.0) as made:
        yield made
