"""`polar rescore`: rewards as the gateway would have spread them, of an evaluator that needs no sandbox."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from chain import Chain
from cli.conftest import at, inside, polar, task_file
from peers.engine import ScriptedEngine
from peers.harness import scripted
from polar.codec import from_msgpack, to_msgpack
from polar.records import SessionResult

PASSES = {"evaluator": {"strategy": "session_completed"}}
PER_TOKEN, CHOOSY = "peers.scorers:PerToken", "peers.scorers:Choosy"
FORKING = (("call", "hello"), ("call", "go on"), ("forget", 2), ("call", "again"))


@pytest.fixture(scope="module")
def tasks(chain: Chain, engine: ScriptedEngine) -> Chain:
    chain.run("graded", num_samples=2, **PASSES, **scripted(*FORKING))
    chain.run("late", timeout_seconds=2, evaluator=None, **scripted(("call", "hello"), ("sleep", 600)))
    ungradable = {"strategy": "command", "config": {"command": "true", "reward_file": "/session/none"}}
    chain.run("ungraded", evaluator=ungradable, **scripted(("call", "hello")))
    chain.run("silent", **PASSES, **scripted(("exit", 0)))
    return chain


def scored(tasks: Chain, tmp_path: Path, *words: object) -> list[SessionResult]:
    out = tmp_path / "scored.msgpack"
    done = at(tasks, "rescore", *words, "--out", out)
    assert done.exit_code == 0, done.output
    return from_msgpack(out.read_bytes(), list[SessionResult])


def in_a_process(tasks: Chain, *words: object) -> subprocess.CompletedProcess[str]:
    """For what logs: a process logs to the stderr that it had first."""
    folder = str(Path(__file__).parents[1])
    return polar("rescore", *map(str, words), POLAR_SERVER_URL=tasks.url, PYTHONPATH=folder)


def rewards(result: SessionResult) -> list[float | None]:
    return [trace.reward for trace in result.trajectory.traces]


def test_rewards_a_trace_and_a_setting(tasks: Chain, tmp_path):
    words = ["graded", "--evaluator", PER_TOKEN]
    for result in scored(tasks, tmp_path, *words, "--config", "each=0.5"):
        assert rewards(result) == [3.0, 1.5]
        told = result.trajectory.metadata["evaluation"]
        assert (told["strategy"], told["trace_rewards"]) == (PER_TOKEN, [3.0, 1.5])
        assert (told["asked"], told["ended"]) == ("do it", "done")
    shown = at(tasks, "rescore", *words)
    lines = [line.split() for line in shown.stdout.splitlines()]
    assert ["2", "1", "→", "4.5", "scored"] in [line[1:] for line in lines]
    assert ["all", "4", "1", "→", "4.5", "2", "sessions"] in lines


def test_the_same_evaluator_gives_the_stored_bytes(tasks: Chain, tmp_path):
    rows = tasks.http.get("/tasks/graded/sessions").json()["sessions"]
    files = [tasks.data / "tasks" / "graded" / f"{row['session_id']}.1.result" for row in rows]
    results = scored(tasks, tmp_path, "graded", "--evaluator", "session_completed")
    assert [to_msgpack(result) for result in results] == [file.read_bytes() for file in files]


def test_a_session_whose_evaluator_failed_goes_by_what_its_run_ended_with(tasks: Chain, tmp_path):
    (result,) = scored(tasks, tmp_path, "ungraded", "--evaluator", "session_completed")
    assert (result.status, result.error, result.metadata["termination"]) == ("COMPLETED", None, "done")
    assert "run_termination" not in result.metadata
    assert "fault" not in result.metadata
    assert rewards(result) == [1.0]


def test_a_timeout_is_scored_and_stays_a_timeout(tasks: Chain, tmp_path):
    (result,) = scored(tasks, tmp_path, "late", "--evaluator", "session_completed")
    assert (result.status, result.metadata["termination"]) == ("TIMEOUT", "agent_timeout")
    assert rewards(result) == [0.0]


def test_an_evaluator_that_fails_on_one_session_is_named_and_the_others_go_on(tasks: Chain, tmp_path):
    words = ["graded", "silent", "--evaluator", CHOOSY, "--out", tmp_path / "new.jsonl"]
    done = in_a_process(tasks, *words, "--json")
    assert done.returncode == 1
    rows = json.loads(done.stdout)["sessions"]
    assert [row["what"] for row in rows] == ["scored", "failed", "kept"]
    assert [row["after"] and row["after"]["reward"] for row in rows] == [0.25, None, None]
    assert rows[1]["why"] == "the evaluator raised KeyError: '-s1-'"
    good, bad, kept = (json.loads(line) for line in (tmp_path / "new.jsonl").read_text().splitlines())
    assert good["trajectory"]["traces"][0]["reward"] == 0.25
    assert (bad["status"], bad["metadata"]["termination"]) == ("ERROR", "evaluation")
    assert bad["metadata"]["run_termination"] == "done"
    assert [trace["reward"] for trace in bad["trajectory"]["traces"]] == [None, None]
    assert kept["metadata"]["termination"] == "no_calls"
    told = in_a_process(tasks, *words)
    assert f"{rows[1]['session_id']}: the evaluator raised KeyError: '-s1-'" in told.stdout


def test_what_run_has_saved_can_be_scored(chain: Chain, tmp_path):
    fields = {"num_samples": 2, **PASSES, **scripted(("call", "hello"))}
    file = task_file(tmp_path / "t.jsonl", *({"task_id": f"saved{n}", **fields} for n in range(2)))
    assert at(chain, "run", file, "--save", tmp_path / "saved.jsonl").exit_code == 0
    results = scored(chain, tmp_path, "--in", tmp_path / "saved.jsonl", "--evaluator", PER_TOKEN)
    assert [rewards(result) for result in results] == [[3.0]] * 4
    again = scored(chain, tmp_path, "--in", tmp_path / "scored.msgpack", "--evaluator", "session_completed")
    assert [rewards(result) for result in again] == [[1.0]] * 4, "a file may be replaced by what is made of it"


def test_a_file_of_tasks_that_the_server_does_not_know_is_named_a_session(tasks: Chain, tmp_path):
    results = scored(tasks, tmp_path, "graded", "--evaluator", "session_completed")
    for result in results[:1]:
        result.task_id = "elsewhere"
    (tmp_path / "in.msgpack").write_bytes(to_msgpack(results))
    done = at(tasks, "rescore", "--in", tmp_path / "in.msgpack", "--evaluator", PER_TOKEN)
    assert done.exit_code == 1
    assert f"{results[0].session_id}: its task elsewhere: Task not found" in done.stdout


@pytest.mark.parametrize("name", ["command", "test_on_output", "polar.evaluators.base:BaseEvaluator"])
def test_an_evaluator_that_needs_a_sandbox_is_refused_with_why(tasks: Chain, name):
    done = at(tasks, "rescore", "graded", "--evaluator", name)
    assert done.exit_code == 2
    assert f"the evaluator {name} looks into the sandbox" in done.stderr
    assert "use session_completed, or a module:Class" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["graded", "--evaluator", "best"], "unknown evaluator 'best'"),
        (["graded", "--evaluator", PER_TOKEN, "--config", "eech=1"], "eech"),
        (["graded", "--evaluator", PER_TOKEN, "--config", "each=much"], "each"),
        (["graded", "--evaluator", PER_TOKEN, "--config", "each"], "write it as key=value"),
        (["no-such-task", "--evaluator", PER_TOKEN], "no-such-task"),
        (["--evaluator", PER_TOKEN], "--in FILE"),
        (["graded", "--in", "x.json", "--evaluator", PER_TOKEN], "one of them"),
        (["--in", "/no/such.json", "--evaluator", PER_TOKEN], "--in /no/such.json cannot be read: No such file"),
        (["--in", "/tmp", "--evaluator", PER_TOKEN], "--in /tmp is a folder"),
        (["--in", "/dev/null", "--evaluator", PER_TOKEN], "one of .json, .jsonl, .msgpack"),
        (["graded"], "--evaluator"),
    ],
)
def test_a_mistake_is_named_before_the_work_begins(tasks: Chain, words, said):
    done = at(tasks, "rescore", *words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert not done.stdout


@pytest.mark.parametrize(
    ("name", "content"),
    [("a.json", b""), ("a.json", b"[1,"), ("a.jsonl", b'{"results": 3}\n'), ("a.msgpack", b"\xdd\0\0\0\2\xc0")],
)
def test_a_file_that_is_none_of_results_is_named(tasks: Chain, tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    done = at(tasks, "rescore", "--in", tmp_path / name, "--evaluator", PER_TOKEN)
    assert done.exit_code == 2
    assert f"--in {tmp_path / name}" in done.stderr


def test_without_a_server_it_says_how_to_read_the_folder(tmp_path):
    done = inside("rescore", "graded", "--evaluator", PER_TOKEN, "--server", "http://127.0.0.1:9")
    assert done.exit_code == 3
    assert "--data" in done.stderr
