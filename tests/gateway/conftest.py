from __future__ import annotations

from collections.abc import Iterator

import pytest

from chain import Chain, polar_serve
from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_engine(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))) as made:
        yield made


@pytest.fixture(scope="module")
def chain(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with polar_serve(tmp_path_factory.mktemp("polar") / "data", engine.url, "--run-workers=4") as made:
        yield made
