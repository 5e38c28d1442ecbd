"""kill −9 of server and gateway in the middle of a session: one result, no recorded completion lost, nothing left."""

from __future__ import annotations

import signal
import time
from pathlib import Path

from chain import polar_serve, until
from gateway_processes import processes_with
from halves import polar_gateway, polar_server, topology
from peers.engine import scripted_engine
from peers.harness import scripted
from peers.tokenizer import make_tokenizer
from polar.sessionlog import parse, unpack


def test_killed_in_the_middle_it_goes_on_as_the_next_attempt(tmp_path: Path) -> None:
    mark = "call-of-the-killed-test"
    with scripted_engine(make_tokenizer(tmp_path)) as engine:
        steps = scripted(("call", mark), ("call", "and then"), ("write", "$ARTIFACTS_DIR/done"))
        with polar_serve(tmp_path / "data", engine.url) as first:
            engine.script({"text": "first"}, {"text": "second", "hold": True})
            asked = len(engine.requests)
            assert first.submit("task", **steps).status_code == 200
            until(lambda: len(engine.requests) >= asked + 2)
            assert processes_with(mark)
            first.process.send_signal(signal.SIGKILL)
            first.process.wait(10)
        until(lambda: not processes_with(mark))
        engine.release()
        with polar_serve(tmp_path / "data", engine.url) as second:
            (result,) = second.results("task")
            assert (result["status"], result["metadata"]["attempt"]) == ("COMPLETED", 2)
            assert [trace["reward"] for trace in result["trajectory"]["traces"]] == [1.0]
            path = f"/tasks/task/sessions/{result['session_id']}/log"
            until(lambda: second.http.get(path, params={"attempt": 1}).status_code == 200)
            lost = parse(unpack(second.http.get(path, params={"attempt": 1}).content))
            assert [call.finished is not None for call in lost.calls] == [True, False]
            assert not list((tmp_path / "data" / "gateway" / "sandboxes").glob("*"))
        assert not list((tmp_path / "data" / "gateway" / "outbox").glob("*"))


def test_stopped_in_the_middle_it_goes_on_and_the_attempt_is_not_counted(tmp_path: Path) -> None:
    with scripted_engine(make_tokenizer(tmp_path)) as engine:
        steps = scripted(("call", "hello"), ("write", "$ARTIFACTS_DIR/done"))
        engine.script({"text": "never said", "hold": True})
        with polar_serve(tmp_path / "data", engine.url) as stopped:
            asked = len(engine.requests)
            stopped.submit("task", max_attempts=1, **steps)
            until(lambda: len(engine.requests) > asked)
            stopped.process.send_signal(signal.SIGTERM)
            assert stopped.process.wait(20) == 0
        engine.release()
        with polar_serve(tmp_path / "data", engine.url) as last:
            (result,) = last.results("task")
            assert (result["status"], result["metadata"]["attempt"]) == ("COMPLETED", 2)
            path = f"/tasks/task/sessions/{result['session_id']}/log"
            assert last.http.get(path, params={"attempt": 1}).status_code == 200


def test_a_gateway_is_the_newest_of_its_name_also_when_the_clock_was_set_back(tmp_path: Path) -> None:
    data = tmp_path / "gateway"
    data.mkdir()
    (data / "epoch").write_text(str(time.time_ns() // 1_000_000 + 10**9))  # of a life whose clock was days ahead
    with scripted_engine(make_tokenizer(tmp_path)) as engine, polar_server(tmp_path / "server") as server:
        file = topology(tmp_path / "topology.yaml", engine.url, 0.2)
        for name in ("first", "second"):
            with polar_gateway(data, server, file) as gateway:
                server.submit(name, **scripted(("call", "hello")))
                until(lambda name=name: server.status(name)["status"] == "completed", 60)
                assert gateway.poll() is None
