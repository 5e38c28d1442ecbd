"""Files of results: every format holds the same, whole or not at all, and none is ever in memory as a whole."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from polar.cli.resultfile import reading, writing
from polar.codec import from_json, from_msgpack, to_msgpack
from polar.errors import ConfigError
from polar.records import SessionResult, SessionStatus, Trace, Trajectory

FORMATS = [".json", ".jsonl", ".msgpack"]


def result(number: int, tokens: int) -> SessionResult:
    ids = np.arange(tokens)
    trace = Trace(
        prompt_ids=ids[:1],
        response_ids=ids,
        loss_mask=np.ones(tokens),
        response_logprobs=-ids / 7,
        weight_versions=[(0, tokens, "1")],
    )
    trajectory = Trajectory(status=SessionStatus.COMPLETED, traces=[trace])
    return SessionResult(session_id=f"s{number}", task_id="t", status=SessionStatus.COMPLETED, trajectory=trajectory)


@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.parametrize("ending", FORMATS)
def test_what_was_written_is_read(tmp_path: Path, ending: str, count: int) -> None:
    path = tmp_path / f"a{ending}"
    with writing(path) as write:
        for number in range(count):
            write(result(number, 5))
    if count == 0 and ending == ".jsonl":
        assert path.read_bytes().strip() == b""
        return
    total, results = reading(path)
    assert total == count
    assert [to_msgpack(each) for each in results] == [to_msgpack(result(number, 5)) for number in range(count)]


def test_json_and_msgpack_are_one_list_for_any_program(tmp_path: Path) -> None:
    for ending, decode in ((".json", from_json), (".msgpack", from_msgpack)):
        with writing(tmp_path / f"a{ending}") as write:
            write(result(0, 5))
            write(result(1, 5))
        assert [each.session_id for each in decode((tmp_path / f"a{ending}").read_bytes(), list[SessionResult])] == [
            "s0",
            "s1",
        ]


@pytest.mark.parametrize("ending", FORMATS)
def test_memory_holds_one_result_however_many_there_are(tmp_path: Path, ending: str) -> None:
    path, tokens, count = tmp_path / f"a{ending}", 5_000, 30
    tracemalloc.start()
    try:
        with writing(path) as write:
            for number in range(count):
                write(result(number, tokens))
        for each in reading(path)[1]:
            assert each.trajectory is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 250 * tokens, "a list of its numbers once or twice, and not thirty times"


@pytest.mark.parametrize("before", [None, b"as it was"])
def test_a_block_that_fails_leaves_what_was_there(tmp_path: Path, before: bytes | None) -> None:
    path = tmp_path / "a.json"
    if before is not None:
        path.write_bytes(before)
    with pytest.raises(ZeroDivisionError), writing(path) as write:
        write(result(1 // 0, 5))
    assert [each.read_bytes() for each in tmp_path.iterdir()] == [before] * (before is not None)


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    """/dev/full takes no byte; its folder takes no other file."""
    (tmp_path / "a.json.part").symlink_to("/dev/full")
    with pytest.raises(Exception, match="No space left") as caught, writing(tmp_path / "a.json") as write:
        write(result(0, 50_000))
    assert caught.value.name == "disk_full"
    assert not list(tmp_path.iterdir())


def test_an_entry_that_is_no_result_is_named_by_its_number(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(
        b'{"session_id": "s", "task_id": "t", "status": "COMPLETED"}\n{"session_id": 3}\n'
    )
    _, results = reading(tmp_path / "a.jsonl")
    assert next(results).session_id == "s"
    with pytest.raises(ConfigError, match="entry 2 is no result"):
        next(results)
