"""One `polar serve` over one scripted engine for all examples; its gateway finds plug-ins where run.sh has them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.examples.making import EXAMPLES

from chain import Chain, polar_serve
from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer


@pytest.fixture(scope="session")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_engine(make_tokenizer(tmp_path_factory.mktemp("tokenizer"))) as made:
        made.context(100_000)
        yield made


@pytest.fixture(scope="session")
def chain(tmp_path_factory: pytest.TempPathFactory, engine: ScriptedEngine) -> Iterator[Chain]:
    within = ("env", f"PYTHONPATH={EXAMPLES / 'swegym_slime_grpo'}")
    with polar_serve(tmp_path_factory.mktemp("serve") / "data", engine.url, within=within) as made:
        yield made
