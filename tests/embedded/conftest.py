"""Engines are shared where a test leaves them as they were."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="the embedded engine needs torch: install the extra 'demo'")

from embedded.real_engine import Engine, engine_process, save_random_policy


@pytest.fixture(scope="session")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_policy(tmp_path_factory.mktemp("first"), seed=1)


@pytest.fixture(scope="session")
def second_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random_policy(tmp_path_factory.mktemp("second"), seed=2)


@pytest.fixture(scope="session")
def shared_engine(first_weights: Path) -> Iterator[Engine]:
    with engine_process(first_weights, "--weight-version", "1") as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: Engine, first_weights: Path) -> Iterator[Engine]:
    """The engine as it was at start: running, with the first weights."""
    yield shared_engine
    shared_engine.post("/continue_generation", {})
    shared_engine.post("/update_weights_from_disk", {"model_path": str(first_weights), "weight_version": "1"})
