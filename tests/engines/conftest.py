"""Models that the real engines serve."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engines.real import make_models, program


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two sets of weights of a random model; made with the Python of whichever engine is named."""
    python = os.environ.get("POLAR_TEST_SGLANG") or program("POLAR_TEST_VLLM", "an engine's Python")
    return make_models(python, tmp_path_factory.mktemp("models"))
