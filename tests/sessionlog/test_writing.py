"""When `append` returns, the record is in the file, whole; when it raises, nothing of it is, and no other is lost."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

from peers.session_logs import header
from polar.errors import ServerFault
from polar.sessionlog import Chunk, LogWriter, Opened, Refused, read
from polar.sessionlog.writer import write_fault

CHUNK = Chunk(call=1, ids=np.arange(256), logprobs=np.full(256, -1.0))


def opened(number: int) -> Opened:
    return Opened(call=number, at=0.0, dialect="openai_chat", body=b"", model="policy")


def test_a_sealed_log_says_what_it_holds_and_takes_no_more(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "deep" / "s.log", header()) as writer:
        writer.append(opened(1))
        writer.append(CHUNK)
        assert not writer.sealed
        writer.seal()
        writer.seal()
        assert writer.sealed
        with pytest.raises(ServerFault) as caught:
            writer.append(CHUNK)
    assert caught.value.name == "log_sealed"
    sealed = read(writer.path).sealed
    assert sealed is not None
    assert (sealed.calls, sealed.sampled) == (1, 256)
    assert writer.path.stat().st_mode & 0o777 == 0o600


def test_a_log_that_was_only_closed_is_not_sealed(tmp_path: Path) -> None:
    with LogWriter(tmp_path / "s.log", header()) as writer:
        writer.append(opened(1))
    log = read(writer.path)
    assert (len(log.calls), log.sealed, log.torn) == (1, None, False)


def test_a_log_is_never_written_over(tmp_path: Path) -> None:
    LogWriter(tmp_path / "s.log", header()).seal()
    before = (tmp_path / "s.log").read_bytes()
    with pytest.raises(ServerFault, match=r"s\.log: File exists") as caught:
        LogWriter(tmp_path / "s.log", header())
    assert caught.value.name == "log_write"
    assert (tmp_path / "s.log").read_bytes() == before


@pytest.mark.parametrize("record", [opened(1), opened(3), Chunk(call=2, ids=np.arange(1))])
def test_records_out_of_order_are_refused_before_they_are_written(tmp_path: Path, record: Opened | Chunk) -> None:
    writer = LogWriter(tmp_path / "s.log", header())
    writer.append(opened(1))
    with pytest.raises(ServerFault) as caught:
        writer.append(record)
    assert caught.value.name == "log_order"
    writer.append(opened(2))
    writer.append(Refused(at=0.0, dialect="openai_chat", reason="limit", detail=""))
    log = read(writer.path)
    assert (len(log.calls), len(log.refusals)) == (2, 1)


@pytest.mark.parametrize(
    ("number", "name"),
    [
        (errno.ENOSPC, "disk_full"),
        (errno.EDQUOT, "disk_full"),
        (errno.EFBIG, "disk_full"),
        (errno.EIO, "log_write"),
        (errno.EACCES, "log_write"),
    ],
)
def test_a_full_disk_has_a_name_of_its_own(number: int, name: str) -> None:
    fault = write_fault(Path("s.log"), OSError(number, os.strerror(number)))
    assert (fault.name, fault.retryable) == (name, True)


PRELUDE = """
    import os, resource, sys
    from pathlib import Path
    import numpy as np
    from polar.errors import ServerFault
    from polar.sessionlog import Chunk, Finished, Header, LogWriter, Opened, pack

    HEADER = Header(session_id="s1", task_id="t1", attempt=1, model="policy", created_at=0.0)
    OPENED = Opened(call=1, at=0.0, dialect="openai_chat", body=b"", model="policy")
    CHUNK = Chunk(call=1, ids=np.arange(256), logprobs=np.full(256, -1.0))
"""


def in_child(script: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python of its own, because limits and kills are a whole process's."""
    source = textwrap.dedent(PRELUDE) + textwrap.dedent(script)
    command = [sys.executable, "-c", source, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def output_of(child: subprocess.Popen[str]) -> list[str]:
    output, _ = child.communicate(timeout=60)
    assert child.returncode == 0
    return output.split()


def test_a_record_that_found_no_room_is_cut_off_and_later_ones_are_kept(tmp_path: Path) -> None:
    script = """
        writer = LogWriter(Path(sys.argv[1]), HEADER)
        writer.append(OPENED)
        writer.append(CHUNK)
        size = writer.path.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, resource.RLIM_INFINITY))
        try:
            writer.append(CHUNK)
        except ServerFault as fault:
            print(fault.name, writer.sampled, writer.path.stat().st_size == size)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.append(Finished(call=1, at=0.0, finish_reason="stop"))
        writer.seal()
    """
    assert output_of(in_child(script, tmp_path / "s.log")) == ["disk_full", "256", "True"]
    log = read(tmp_path / "s.log")
    assert (log.torn, len(log.calls[0].ids)) == (False, 256)
    assert log.calls[0].finished is not None
    assert log.sealed is not None


def test_a_device_without_room_is_a_full_disk_and_a_torn_log_takes_nothing_more(tmp_path: Path) -> None:
    """/dev/full says ENOSPC, and cannot be cut back either."""
    script = """
        writer = LogWriter(Path(sys.argv[1]), HEADER)
        writer.append(OPENED)
        links = {int(fd): os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                 if os.path.exists(f"/proc/self/fd/{fd}")}
        (own,) = [fd for fd, target in links.items() if target == sys.argv[1]]
        os.dup2(os.open("/dev/full", os.O_WRONLY), own)
        for _ in range(2):
            try:
                writer.append(CHUNK)
            except ServerFault as fault:
                print(fault.name)
    """
    if not Path("/dev/full").exists() or not Path("/proc/self/fd").exists():
        pytest.skip("needs Linux's /dev/full and /proc")
    assert output_of(in_child(script, tmp_path / "s.log")) == ["disk_full", "log_sealed"]
    assert len(read(tmp_path / "s.log").calls) == 1


def test_a_log_that_found_no_room_for_its_header_leaves_no_file(tmp_path: Path) -> None:
    script = """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
        try:
            LogWriter(Path(sys.argv[1]), HEADER)
        except ServerFault as fault:
            print(fault.name)
    """
    assert output_of(in_child(script, tmp_path / "s.log")) == ["disk_full"]
    assert list(tmp_path.iterdir()) == []


def test_packing_that_found_no_room_leaves_the_log_alone(tmp_path: Path) -> None:
    script = """
        writer = LogWriter(Path(sys.argv[1]), HEADER)
        writer.seal()
        resource.setrlimit(resource.RLIMIT_FSIZE, (20, resource.RLIM_INFINITY))
        try:
            pack(writer.path)
        except ServerFault as fault:
            print(fault.name)
    """
    assert output_of(in_child(script, tmp_path / "s.log")) == ["disk_full"]
    assert [path.name for path in tmp_path.iterdir()] == ["s.log"]
    assert read(tmp_path / "s.log").sealed is not None


def test_a_kill_loses_no_appended_record(tmp_path: Path) -> None:
    script = """
        writer = LogWriter(Path(sys.argv[1]), HEADER)
        writer.append(OPENED)
        for index in range(1_000_000):
            writer.append(CHUNK)
            os.write(1, b"appended\\n")
    """
    child = in_child(script, tmp_path / "s.log")
    assert child.stdout is not None
    acknowledged = [child.stdout.readline() for _ in range(200)]
    child.send_signal(signal.SIGKILL)
    acknowledged += child.stdout.readlines()
    child.wait(timeout=60)
    log = read(tmp_path / "s.log")
    assert acknowledged[:200] == ["appended\n"] * 200
    assert len(log.calls[0].ids) >= 256 * sum(line == "appended\n" for line in acknowledged)
    assert log.sealed is None
