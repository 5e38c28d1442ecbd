"""Case 40: a live session costs some bytes a token, in memory and on disk, however many turns it has."""

from __future__ import annotations

import gc
import itertools
import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peers.engine import ScriptedEngine
from polar.protocols import Rendering
from running_proxy import OpenSession, running_proxy, user

TURNS, ASKED, ANSWERED = 25, 600, 150
BYTES_A_TOKEN = 12
"""in a test whose turns are short; with turns of a thousand tokens it is 4 to 12 (benchmarks/proxy.py)"""


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


def held() -> int:
    """Bytes that were allocated in Polar's own lines and are still there."""
    gc.collect()
    snapshot = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, "*/polar/*")])
    return sum(trace.size for trace in snapshot.traces)


def talk(session: OpenSession, engine: ScriptedEngine, messages: list[dict[str, Any]]) -> int:
    """Some turns; tokens of the conversation so far."""
    source = random.Random(len(messages))
    for _ in range(TURNS):
        engine.script({"text": source.randbytes(ANSWERED // 2).hex()})
        messages.append(user(source.randbytes(ASKED // 2).hex()))
        session.turn(messages)
    return session.log.calls[-1].length


@pytest.mark.slow
def test_bytes_a_token_do_not_grow_with_the_turns(
    tmp_path: Path, engine: ScriptedEngine, rendering: Rendering, traced: None
) -> None:
    with running_proxy(tmp_path, engine.url, rendering, context_length=None) as proxy:
        session = proxy.open()
        messages: list[dict[str, Any]] = []
        tokens, memory, disk = [0], [held()], [session.path.stat().st_size]
        for _ in range(3):
            tokens.append(talk(session, engine, messages))
            memory.append(held())
            disk.append(session.path.stat().st_size)
        assert session.log.calls[-1].prompt.source == "continued"
    grown = [after - before for before, after in itertools.pairwise(tokens)]
    for sizes, most in ((memory, BYTES_A_TOKEN), (disk, 2 * BYTES_A_TOKEN)):
        each = [(after - before) / more for (before, after), more in zip(itertools.pairwise(sizes), grown, strict=True)]
        assert max(each) < most, each
        assert each[2] < 1.3 * each[1], each
