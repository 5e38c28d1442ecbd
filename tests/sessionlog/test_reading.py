"""What was written is what is read, whatever happened to the file's end."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from peers.random_sessions import RandomSession, random_sessions
from peers.session_logs import ScriptedLog, header
from polar.codec import to_msgpack
from polar.errors import ServerFault
from polar.sessionlog import (
    Chunk,
    Finished,
    Header,
    LogWriter,
    Opened,
    Prompt,
    Sealed,
    SessionLog,
    pack,
    parse,
    read,
    unpack,
)
from polar.sessionlog.frames import MAGIC, MAX_FRAME, frame, payloads


@settings(max_examples=300)
@given(session=random_sessions)
def test_the_reader_tells_what_was_written(tmp_path_factory: pytest.TempPathFactory, session: RandomSession) -> None:
    log, truth = session.write(tmp_path_factory.getbasetemp())
    assert len(log.calls) == len(truth.calls)
    for call, true in zip(log.calls, truth.calls, strict=True):
        assert call.ids.tolist() == true.sampled
        assert (call.logprobs is not None) == true.aligned
        if call.logprobs is not None:
            np.testing.assert_array_equal(call.logprobs, np.asarray(true.logprobs, np.float32))
        told: list[str | None] = [None] * len(call.ids)
        for start, end, version in call.spans:
            told[start:end] = [version] * (end - start)
        assert told == true.versions
        assert log.prompt_ids(call).tolist() == (true.prompt or [])
        assert log.messages(call) == true.messages
        assert log.tools(call) == true.tools
        assert (call.delivered, call.joined) == (true.delivered, true.joined)
        assert (call.finished.finish_reason if call.finished else None) == true.finish


def small_log(folder: Path) -> tuple[bytes, list[int]]:
    """The bytes of a sealed log and the offsets at which its frames end."""
    script = ScriptedLog(folder)
    first = script.call([1, 2], [10, 9])
    script.call([1, 2, 10, 9, 3], [11], after=first)
    data = script.path.read_bytes()
    return data, [end for _, end in payloads(data)]


def test_a_log_torn_at_any_byte_is_cut_at_the_last_good_frame(tmp_path: Path) -> None:
    data, ends = small_log(tmp_path)
    for size in range(len(data) + 1):
        survived = [end for end in ends if end <= size]
        if not survived:
            with pytest.raises(ServerFault) as caught:
                parse(data[:size])
            assert caught.value.name == "log_unreadable"
            continue
        log = parse(data[:size])
        assert log.torn == (size != survived[-1])
        assert records_of(log) == len(survived)


def records_of(log: SessionLog) -> int:
    """How many records of a small log stand: its header, and up to five of each call."""
    each = ((call.prompt is not None, len(call.ids) > 0, call.finished, call.delivered) for call in log.calls)
    return 1 + sum(1 + sum(map(bool, parts)) for parts in each)


def test_a_damaged_byte_ends_the_log_before_its_frame(tmp_path: Path) -> None:
    data, ends = small_log(tmp_path)
    for position in range(ends[0], len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 0x40
        log = parse(bytes(damaged))
        assert log.torn
        assert records_of(log) == len([end for end in ends if end <= position])


def test_a_file_of_something_else_is_refused_by_name(tmp_path: Path) -> None:
    for index, data in enumerate([b"", b"{}", MAGIC, b"\0" * 100]):
        path = tmp_path / f"other{index}.log"
        path.write_bytes(data)
        with pytest.raises(ServerFault, match=f"other{index}.log has no readable header") as caught:
            read(path)
        assert caught.value.name == "log_unreadable"


def opened(number: int, **fields: object) -> Opened:
    return msgspec.structs.replace(
        Opened(call=number, at=0.0, dialect="openai_chat", body=b"", model="policy"), **fields
    )


@pytest.mark.parametrize(
    ("records", "said"),
    [
        pytest.param([Sealed(at=0.0, calls=0, sampled=0)], "first record is no header", id="no header"),
        pytest.param([msgspec.structs.replace(header(), schema_version=99)], "schema 99", id="another schema"),
        pytest.param([header(), header()], "second header", id="two headers"),
        pytest.param([header(), Finished(call=1, at=0.0, finish_reason="stop")], "call 1, which was", id="not opened"),
        pytest.param([header(), opened(2)], "call 2 was opened as number 1", id="number left out"),
        pytest.param([header(), opened(1), opened(1)], "call 1 was opened as number 2", id="number used twice"),
        pytest.param([header(), opened(1, messages_base=1)], "call 1 stands on call 1", id="messages on itself"),
        pytest.param([header(), opened(1, tools_from=3)], "call 1 stands on call 3", id="tools of a later call"),
        pytest.param(
            [header(), opened(1), Prompt(call=1, base=1, keep=0, ids=np.asarray([1]), source="rendered")],
            "call 1 stands on call 1",
            id="prompt on itself",
        ),
    ],
)
def test_good_frames_that_contradict_each_other_are_refused_by_name(records: list[object], said: str) -> None:
    with pytest.raises(ServerFault, match=f"cannot be read: .*{said}") as caught:
        parse(MAGIC + b"".join(frame(to_msgpack(record)) for record in records))
    assert caught.value.name == "log_unreadable"


def test_a_record_that_is_no_record_is_refused_by_name() -> None:
    with pytest.raises(ServerFault, match="cannot be read"):
        parse(MAGIC + frame(to_msgpack(header())) + frame(to_msgpack({"type": "dream"})))


def test_a_frame_that_no_reader_would_take_is_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("polar.sessionlog.frames.MAX_FRAME", 10)
    assert frame(b"x" * 10)
    with pytest.raises(ValueError, match="larger than a frame"):
        frame(b"x" * 11)


def test_a_length_beyond_the_limit_is_damage() -> None:
    data = MAGIC + struct.pack("<II", MAX_FRAME + 1, zlib.crc32(b"")) + b"x" * 100
    assert list(payloads(data)) == []


def test_a_null_logprob_is_read_as_nan(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1], [10, 11], logprobs=[-0.5, None])
    (call,) = script.read().calls
    assert call.logprobs is not None
    np.testing.assert_array_equal(call.logprobs, np.asarray([-0.5, np.nan], np.float32))


def test_a_chunk_without_ids_needs_no_logprobs(tmp_path: Path) -> None:
    writer = LogWriter(tmp_path / "pieces.log", header())
    writer.append(opened(1))
    writer.append(Chunk(call=1, ids=np.asarray([10, 11]), logprobs=np.asarray([-1.0, -2.0]), version="1"))
    writer.append(Chunk(call=1, ids=np.asarray([], np.int32), version="2"))
    writer.append(Chunk(call=1, ids=np.asarray([12]), logprobs=np.asarray([-3.0]), version="1"))
    (call,) = read(writer.path).calls
    assert call.logprobs is not None
    assert call.logprobs.tolist() == [-1.0, -2.0, -3.0]
    assert call.spans == [(0, 3, "1")]


@pytest.mark.parametrize("pieces", [[None, [-1.0, -2.0, -3.0]], [[-1.0, -2.0], [-3.0]], [[-1.0], None]])
def test_logprobs_that_are_not_one_an_id_are_none_for_the_whole_call(tmp_path: Path, pieces: list[list[float]]) -> None:
    writer = LogWriter(tmp_path / "misaligned.log", header())
    writer.append(opened(1))
    for ids, logprobs in zip([[10], [11, 12]], pieces, strict=True):
        values = None if logprobs is None else np.asarray(logprobs)
        writer.append(Chunk(call=1, ids=np.asarray(ids), logprobs=values))
    (call,) = read(writer.path).calls
    assert (call.ids.tolist(), call.logprobs) == ([10, 11, 12], None)


def test_a_call_that_was_never_opened_is_a_key_error(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1], [10])
    log = script.read()
    assert log.call(1).number == 1
    for number in (0, 2, -1):
        with pytest.raises(KeyError):
            log.call(number)


def test_a_packed_log_is_the_log(tmp_path: Path) -> None:
    data, _ = small_log(tmp_path)
    packed, name = pack(tmp_path / "session.log")
    assert packed == tmp_path / "session.log.zst"
    assert unpack(packed.read_bytes()) == data
    assert to_msgpack(read(packed)) == to_msgpack(parse(data))
    assert pack(tmp_path / "session.log")[1] == name
    assert sorted(path.name for path in tmp_path.iterdir()) == ["session.log", "session.log.zst"]


def test_a_damaged_pack_is_an_error_at_every_length(tmp_path: Path) -> None:
    small_log(tmp_path)
    data = pack(tmp_path / "session.log")[0].read_bytes()
    for size in range(len(data)):
        with pytest.raises(zstandard.ZstdError):
            unpack(data[:size])
    with pytest.raises(zstandard.ZstdError):
        unpack(data[:-8] + bytes(8))


def test_the_header_is_read_back(tmp_path: Path) -> None:
    made = Header(
        session_id="s-1",
        task_id="t-1",
        attempt=2,
        session_index=3,
        model="policy",
        engine="sglang",
        tokenizer="tok",
        tokenizer_sha256="00",
        sampling={"temperature": 0.7},
        created_at=5.0,
    )
    LogWriter(tmp_path / "h.log", made).seal()
    log = read(tmp_path / "h.log")
    assert log.header == made
    assert (log.calls, log.torn) == ([], False)
    assert log.sealed is not None
