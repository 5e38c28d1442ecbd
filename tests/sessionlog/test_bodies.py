"""Request bodies come back byte for byte, and a log of them is linear in what was said."""

from __future__ import annotations

import json
import random
from pathlib import Path

import msgspec
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.session_logs import header
from polar.codec import to_msgpack
from polar.errors import ServerFault
from polar.sessionlog import Bodies, Body, LogWriter, Opened, SessionLog, parse, read
from polar.sessionlog.bodies import BLOCK
from polar.sessionlog.frames import MAGIC, frame


def opened(number: int, **body: object) -> Opened:
    return Opened(call=number, at=0.0, dialect="openai_chat", model="policy", **({"body": b""} | body))


def written(path: Path, bodies: list[tuple[bytes, int | None]]) -> SessionLog:
    """A log of these bodies, each with the call that it is like."""
    memory = Bodies()
    with LogWriter(path, header()) as log:
        for number, (raw, like) in enumerate(bodies, 1):
            stored = memory.stored(Body(raw), like)
            log.append(opened(number, **stored.fields))
            memory.remember(number, stored)
    return read(path)


@st.composite
def edited_bodies(draw: st.DrawFn) -> list[tuple[bytes, int | None]]:
    """Each an earlier one with something put in, taken out or changed somewhere; of a few blocks."""
    source = random.Random(draw(st.integers(0, 1000)))
    bodies = [source.randbytes(draw(st.sampled_from([0, 10, BLOCK, 3 * BLOCK - 1, 4 * BLOCK])))]
    made: list[tuple[bytes, int | None]] = [(bodies[0], None)]
    for _ in range(draw(st.integers(0, 12))):
        like = draw(st.integers(0, len(bodies) - 1))
        old = bodies[like]
        start, end = sorted(draw(st.tuples(st.integers(0, len(old)), st.integers(0, len(old)))))
        new = old[:start] + source.randbytes(draw(st.sampled_from([0, 1, BLOCK, 2 * BLOCK + 7]))) + old[end:]
        bodies.append(new)
        made.append((new, draw(st.sampled_from([None, like + 1, 99]))))
    return made


@settings(max_examples=200)
@given(bodies=edited_bodies())
def test_bodies_are_read_as_they_came(
    tmp_path_factory: pytest.TempPathFactory, bodies: list[tuple[bytes, int | None]]
) -> None:
    log = written(tmp_path_factory.mktemp("bodies") / "a.log", bodies)
    assert [log.body(call) for call in log.calls] == [raw for raw, _ in bodies]


def test_a_long_conversation_costs_what_each_turn_adds(tmp_path: Path) -> None:
    """200 turns of 1 kB, tools of 50 kB behind them, and a line in front of those that is another every time."""
    source = random.Random(0)
    text = [source.randbytes(500).hex() for _ in range(200)]
    tools = source.randbytes(25_000).hex()
    bodies = [
        json.dumps({"model": "policy", "messages": text[:turn], "system": f"cch={turn};", "tools": tools}).encode()
        for turn in range(1, 201)
    ]
    log = written(tmp_path / "a.log", [(raw, turn or None) for turn, raw in enumerate(bodies)])
    assert [log.body(call) for call in log.calls] == bodies
    late = [len(call.opened.body) for call in log.calls[100:]]
    assert max(late) < 2 * BLOCK + 1000
    assert sum(len(raw) for raw in bodies) > 10 * (tmp_path / "a.log").stat().st_size


def test_equal_bodies_have_equal_digests_and_others_do_not() -> None:
    raw = random.Random(1).randbytes(3 * BLOCK + 5)
    changed = [raw[:-1], raw + b"x", b"x" + raw[1:], raw[:BLOCK] + b"x" + raw[BLOCK + 1 :], raw[BLOCK:]]
    assert Body(bytes(raw)).digest == Body(raw).digest
    assert len({Body(each).digest for each in [raw, *changed]}) == 6


def test_a_log_from_before_bodies_were_shared_is_read(tmp_path: Path) -> None:
    old = msgspec.structs.replace(header(), schema_version=1)
    plain = {"type": "opened", "call": 1, "at": 0.0, "dialect": "d", "model": "m", "body": zstandard.compress(b"{}")}
    log = parse(MAGIC + frame(to_msgpack(old)) + frame(to_msgpack(plain)))
    assert log.body(log.calls[0]) == b"{}"


def test_a_body_that_stands_on_a_later_one_is_refused_by_name() -> None:
    records = [header(), opened(1, body_base=1)]
    with pytest.raises(ServerFault, match="call 1 stands on call 1"):
        parse(MAGIC + b"".join(frame(to_msgpack(record)) for record in records))
