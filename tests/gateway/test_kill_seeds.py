"""kill −9 of server and gateway at drawn places, again and again: every session has one result, every callback arrives
with it, nothing that a harness has heard is lost, nothing is trained twice, and nothing stays behind.

A failing run names its seed: `python tests/kill_run.py SEED` repeats it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kill_run import KillRun
from peers import killer
from peers.engine import ScriptedEngine, scripted_engine
from peers.tokenizer import make_tokenizer
from polar.errors import PolarError

AT_ONCE = 4


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


@pytest.fixture(scope="module")
def engine(tokenizer: Path) -> Iterator[ScriptedEngine]:
    with scripted_engine(tokenizer, numbered=True) as made:
        yield made


def killed(seeds: Iterable[int], folder: Path, engine: ScriptedEngine, tokenizer: Path) -> Counter[str]:
    """How often each point was met. Fails with what every seed that failed has to say."""
    met: Counter[str] = Counter()
    failures: list[str] = []

    def run(seed: int) -> None:
        own = folder / str(seed)
        own.mkdir()
        try:
            met.update(KillRun(seed, own, engine.url, tokenizer).run())
        except (AssertionError, PolarError, OSError) as failure:
            failures.append(f"seed {seed}: {failure!r}")

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(run, seeds))
    assert failures == [], f"{len(failures)} runs failed"
    return met


@pytest.mark.parametrize("first", range(0, 20, AT_ONCE))
def test_killed_at_drawn_places(first: int, tmp_path: Path, engine: ScriptedEngine, tokenizer: Path) -> None:
    assert killed(range(first, first + AT_ONCE), tmp_path, engine, tokenizer)


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_killed_at_every_place(tmp_path: Path, engine: ScriptedEngine, tokenizer: Path) -> None:
    met = killed(range(1000, 1200), tmp_path, engine, tokenizer)
    print(dict(met))
    assert set(met) == set(killer.SERVER) | set(killer.GATEWAY)
