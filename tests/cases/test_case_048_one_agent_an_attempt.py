"""Case 48: a lost connection to the sandbox ends the attempt. The agent is started once an attempt, never again in the
sandbox that it has used, and attempts have logs and traces of their own."""

from __future__ import annotations

import os
import signal
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from chain import Chain, polar_serve, until
from gateway_processes import processes_with
from peers.engine import ScriptedEngine, scripted_engine
from peers.harness import scripted
from peers.tokenizer import make_tokenizer
from polar.sessionlog import SessionLog, parse, unpack
from sandboxing import needs_bubblewrap

pytestmark = needs_bubblewrap


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScriptedEngine]:
    with scripted_engine(make_tokenizer(tmp_path_factory.mktemp("tokenizer")), numbered=True) as made:
        yield made


@pytest.fixture(scope="module")
def chain(engine: ScriptedEngine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chain]:
    with polar_serve(tmp_path_factory.mktemp("polar") / "data", engine.url) as made:
        yield made


def agent(mark: str, *more: tuple[str, Any], **runtime: Any) -> dict[str, Any]:
    """One call, word that it has begun, then the rest."""
    begun = ("write", "$SESSION_DIR/begun")
    return scripted(("call", mark), begun, *more, ("call", "go on"), ("write", "$ARTIFACTS_DIR/done"), **runtime)


def log_of(chain: Chain, result: dict[str, Any], attempt: int) -> SessionLog:
    path = f"/tasks/{result['task_id']}/sessions/{result['session_id']}/log"
    until(lambda: chain.http.get(path, params={"attempt": attempt}).status_code == 200)
    return parse(unpack(chain.http.get(path, params={"attempt": attempt}).content))


def texts(log: SessionLog) -> list[str]:
    return [call.finished.message["content"] for call in log.calls if call.finished and call.finished.message]


def starts(log: SessionLog) -> int:
    """Conversations begun; each start of the agent begins one."""
    return sum(call.opened.messages_base is None for call in log.calls)


def faults(chain: Chain, session_id: str) -> list[str | None]:
    with closing(sqlite3.connect(f"file:{chain.data}/polar.db?mode=ro", uri=True)) as database:
        rows = database.execute("SELECT fault FROM attempts WHERE session_id = ? ORDER BY number", (session_id,))
        return [row[0] for row in rows]


def check(chain: Chain, result: dict[str, Any], fault: str) -> None:
    assert (result["status"], result["metadata"]["attempt"]) == ("COMPLETED", 2), result
    until(lambda: faults(chain, result["session_id"]) == [fault, None])
    lost, won = log_of(chain, result, 1), log_of(chain, result, 2)
    assert (starts(lost), starts(won)) == (1, 1)
    assert (len(texts(lost)), len(texts(won))) == (1, 2)
    assert not set(texts(lost)) & set(texts(won))
    (trace,) = result["trajectory"]["traces"]
    said = [message["content"] for message in trace["response_messages"] if message["role"] == "assistant"]
    assert said == texts(won)
    assert result["trajectory"]["metadata"]["tokens"]["attempt_discarded"] > 0
    assert trace["reward"] == 1.0


def test_the_connection_to_the_running_agent_is_reset(chain: Chain) -> None:
    """The agent itself lives on, and would answer, had it not been ended with its attempt."""
    mark = "agent-behind-a-reset-connection"
    steps = agent(mark, ("sleep", 3), import_path="peers.broken:DroppedExec")
    (result,) = chain.run("reset", **steps)
    check(chain, result, "io_error")
    assert processes_with(mark) == []


def until_begun(chain: Chain, name: str) -> list[Path]:
    """The folders of the sandboxes, once each agent has written that it has begun."""
    chain.submit(name, **agent(f"agent-of-{name}", ("sleep", 3)))
    root = chain.data / "gateway" / "sandboxes"
    until(lambda: [path for path in root.iterdir() if (path / "session" / "begun").exists()])
    return list(root.iterdir())


def test_the_process_behind_the_connection_is_killed(chain: Chain) -> None:
    (folder,) = until_begun(chain, "server-killed")
    os.kill(int((folder / "server.pid").read_text().split()[0]), signal.SIGKILL)
    (result,) = chain.results("server-killed")
    check(chain, result, "sandbox_lost")


def test_the_launcher_of_all_sandboxes_is_killed(chain: Chain) -> None:
    until_begun(chain, "launcher-killed")
    (launcher,) = (pid for pid in children(chain.process.pid) if name_of(pid) == "polar-sandboxes")
    os.kill(launcher, signal.SIGKILL)
    (result,) = chain.results("launcher-killed")
    check(chain, result, "sandbox_lost")


def children(parent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]


def name_of(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()
