from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer
from polar.protocols import Rendering
from polar.proxy import load_rendering
from running_proxy import RunningProxy, running_proxy


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="session")
def rendering(tokenizer: Path) -> Rendering:
    return load_rendering(tokenizer)


@pytest.fixture
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer) as made:
        yield made


@pytest.fixture
def proxy(tmp_path: Path, engine: ScriptedEngine, rendering: Rendering) -> Iterator[RunningProxy]:
    with running_proxy(tmp_path, engine.url, rendering) as made:
        yield made
