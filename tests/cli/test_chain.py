"""The whole chain by its commands: a file of tasks is run, looked at and explained."""

from __future__ import annotations

import json
import signal
import subprocess

from chain import until
from cli.conftest import at, command, environment, gone, inside, marked, polar, task_file
from peers.harness import scripted
from polar.codec import from_json
from polar.records import TaskResult, TaskState

GRADED = {"evaluator": {"strategy": "session_completed"}}
TWO_TURNS = scripted(("call", "hello"), ("call", "go on"))


def sessions(chain, task):
    return [row["session_id"] for row in chain.http.get(f"/tasks/{task}/sessions").json()["sessions"]]


def test_run_prints_rewards_and_saves_results(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "run", "num_samples": 2, **GRADED, **TWO_TURNS})
    done = polar("run", file, "--save", tmp_path / "saved.jsonl", POLAR_SERVER_URL=chain.url)
    assert done.returncode == 0, done.stderr
    row = next(line.split() for line in done.stdout.splitlines() if line.startswith("run "))
    assert row == ["run", "completed", "2/2", "1", "1", "12", "12"]
    assert f"results: {chain.data}" in done.stdout
    assert "polar show run-s" in done.stdout
    saved = from_json((tmp_path / "saved.jsonl").read_bytes(), TaskResult)
    assert saved.status is TaskState.COMPLETED
    assert [trace.reward for result in saved.results for trace in result.trajectory.traces] == [1.0, 1.0]


def test_run_as_json_and_exit_code_of_a_failed_task(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "silent", **GRADED, **scripted(("exit", 0))})
    done = at(chain, "run", file, "--json")
    assert done.exit_code == 1
    assert json.loads(done.stdout)["tasks"][0]["status"] == "failed"


def test_run_marks_sessions_that_will_not_be_trained_with_what_they_ended_as(chain, tmp_path):
    silent = {"task_id": "mute", "num_samples": 2, **GRADED, **scripted(("exit", 0))}
    file = task_file(tmp_path / "t.jsonl", silent, {"task_id": "fine", **GRADED, **TWO_TURNS})
    done = at(chain, "run", file)
    lines = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert lines["task"][-2:] == ["not", "trained"]
    assert lines["mute"][-2:] == lines["all"][-2:] == ["2", "no_calls"]
    assert lines["fine"][-1] == "6", "its trainable tokens; nothing is said of what is trained"
    rows = {row["task_id"]: row for row in json.loads(at(chain, "run", file, "--json").stdout)["tasks"]}
    assert (rows["mute"]["untrained"], rows["fine"]["untrained"]) == ({"no_calls": 2}, {})


def test_a_known_task_is_not_run_again_but_for_fresh(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "again", **GRADED, **TWO_TURNS})
    assert at(chain, "run", file).exit_code == 0
    again = at(chain, "run", file)
    assert "1 of 1 tasks were over before" in again.stderr
    fresh = at(chain, "run", file, "--fresh", "--json")
    assert json.loads(fresh.stdout)["tasks"][0]["task_id"].startswith("again-")


def test_show_tells_each_turns_context_and_spells_its_tokens(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "seen", **GRADED, **TWO_TURNS})
    at(chain, "run", file)
    shown = at(chain, "show", sessions(chain, "seen")[0], "--tokens").stdout
    assert "COMPLETED (done) · reward 1" in shown
    assert "continued from 1" in shown
    assert "ok<|im_end|>" in shown
    assert "model: ok" in shown, "the harness's last lines"


def test_show_of_a_task_names_its_sessions(chain, tmp_path):
    results = chain.run("group", num_samples=2, evaluator=None, **scripted(("call", "hello")))
    done = inside("show", "group", "--server", chain.url)
    assert done.exit_code == 2
    assert "'group' is a task: name one of its sessions" in done.stderr
    assert all(result["session_id"] in done.stderr for result in results)


def test_show_reads_a_log_file_without_a_server(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "filed", **GRADED, **TWO_TURNS})
    at(chain, "run", file)
    log = chain.data / "logs" / f"{sessions(chain, 'filed')[0]}.1.zst"
    shown = inside("show", log, "--tokens")
    assert shown.exit_code == 0, shown.stderr
    assert "continued from 1" in shown.stdout


def test_why_names_reasons_and_sessions(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "quiet", "num_samples": 2, **GRADED, **scripted(("exit", 0))})
    at(chain, "run", file)
    said = at(chain, "why", "quiet").stdout
    assert "no_calls: 2 sessions" in said
    assert all(session in said for session in sessions(chain, "quiet"))
    assert json.loads(at(chain, "why", "quiet", "--json").stdout)["findings"][0]["reason"] == "no_calls"


def test_submit_status_cancel(chain, tmp_path):
    file = task_file(tmp_path / "t.jsonl", {"task_id": "long", **scripted(("call", "hello"), ("sleep", 600))})
    assert at(chain, "submit", file).stdout.split() == ["long", "running"]
    assert at(chain, "submit", file).exit_code == 0, "the same task again is the same task"
    until(lambda: chain.stage("long") == ["RUNNING"])
    assert "long" in at(chain, "status").stdout
    assert at(chain, "cancel", "long").exit_code == 0
    until(lambda: chain.status("long")["status"] == "cancelled")
    gone(sessions(chain, "long")[0])
    assert "cancelled" in at(chain, "why", "long").stdout


def test_ctrl_c_cancels_what_was_submitted(chain, tmp_path):
    steps = scripted(("call", "hello"), ("sleep", 600))
    file = task_file(tmp_path / "t.jsonl", *({"task_id": f"stop{at}", **steps} for at in range(2)))
    with subprocess.Popen(
        command("run", file), stderr=subprocess.PIPE, text=True, env=environment(POLAR_SERVER_URL=chain.url)
    ) as running:
        until(lambda: chain.http.get("/tasks").json()["tasks"][0]["task_id"] == "stop1")
        until(lambda: chain.stage("stop1") == ["RUNNING"])
        running.send_signal(signal.SIGINT)
        assert running.wait(30) == 130
        assert "cancelling 2 tasks" in running.stderr.read()
    assert [chain.status(f"stop{at}")["status"] for at in range(2)] == ["cancelled", "cancelled"]
    gone("stop1-s0")


def test_a_task_that_nobody_can_take_says_what_it_waits_for(chain, tmp_path):
    other = {"agent": {"import_path": "no.such.module:Harness"}}
    file = task_file(tmp_path / "t.jsonl", {"task_id": "strange", **other})
    done = at(chain, "run", file)
    assert done.exit_code == 1
    assert "no.such.module" in at(chain, "why", "strange").stdout


def test_a_task_that_the_server_refuses_is_named_and_the_others_are_taken_back(chain, tmp_path):
    good = {"task_id": "even", **scripted(("call", "hello"), ("sleep", 600))}
    file = task_file(
        tmp_path / "t.jsonl", good, {"task_id": "odd", "agent": {"harness": "nethack"}}, good | {"task_id": "last"}
    )
    done = at(chain, "run", file)
    assert done.exit_code == 2
    assert "task odd: agent.harness: unknown harness 'nethack'" in done.stderr
    assert chain.status("even")["status"] == "cancelled"
    assert not marked("even-s0")
    repaired = task_file(tmp_path / "t.jsonl", {"task_id": "odd", **TWO_TURNS}, {"task_id": "last", **TWO_TURNS})
    assert at(chain, "run", repaired).exit_code == 0, "neither id was spoilt"
