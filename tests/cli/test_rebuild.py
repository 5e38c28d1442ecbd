"""`polar rebuild`: the same log and builder give the bytes that the gateway stored; another builder is compared with
them; what cannot be built is named, and the others go on."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from chain import Chain, polar_serve, until
from cli.conftest import at, inside
from peers.engine import ScriptedEngine
from peers.harness import scripted
from peers.random_sessions import RandomSession, random_sessions
from polar.codec import from_json, from_msgpack, to_msgpack
from polar.endings import EVALUATION_REPLACES, TABLE
from polar.nodeapi import NodeResult
from polar.public import node_result, session_result
from polar.records import EvaluationResult, SessionResult, Termination
from polar.replay import discarded, rebuilt, run_termination, spread
from polar.requests import StrategySpec
from polar.trajectory import BUILDERS, build, load_builder

PASSES = {"evaluator": {"strategy": "session_completed"}}
FORKING = (("call", "hello"), ("call", "go on"), ("forget", 2), ("call", "again"))
BROKEN = {"builder": {"strategy": "peers.broken:Broken"}}


def stored(chain: Chain, task: str) -> list[Path]:
    """The server's own files of the results, in the order of the group."""
    rows = chain.http.get(f"/tasks/{task}/sessions").json()["sessions"]
    return [next((chain.data / "tasks" / task).glob(f"{row['session_id']}.*.result")) for row in rows]


def packed(path: Path) -> list[SessionResult]:
    return from_msgpack(path.read_bytes(), list[SessionResult])


def rows(done) -> dict[str, dict]:
    return {row["session_id"]: row for row in json.loads(done.stdout)["sessions"]}


# The pure core


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("logs")


ENDED = [termination for termination in Termination if TABLE[termination].builds]


@settings(max_examples=150)
@given(
    session=random_sessions,
    strategy=st.sampled_from(sorted(BUILDERS)),
    ended=st.sampled_from([*EVALUATION_REPLACES, Termination.AGENT_TIMEOUT]),
    reward=st.sampled_from(["none", "outcome", "traces"]),
    auxiliary=st.booleans(),
)
def test_built_again_it_has_the_bytes_that_were_stored(session: RandomSession, strategy, ended, reward, auxiliary):
    with tempfile.TemporaryDirectory() as place:
        log, _ = session.write(Path(place))

    def made():
        return build(load_builder(StrategySpec(strategy=strategy)), log, TABLE[ended], include_auxiliary=auxiliary)

    result = as_the_gateway(made(), ended, reward)
    assert to_msgpack(session_result(node_result(result), "t", 3)) == to_msgpack(result)
    assert run_termination(result) is ended
    assert to_msgpack(rebuilt(result, made(), attempt=2)) == to_msgpack(result)


def as_the_gateway(built, ended, reward) -> SessionResult:
    result = NodeResult(
        session_id="s",
        attempt=2,
        node_id="n",
        epoch=1,
        status=TABLE[ended].status,
        termination=ended,
        exit_code=0,
        traces=built.traces,
        run_termination=ended,
        tokens=built.tokens,
        calls=built.calls,
        harness_log="last words",
    )
    if reward == "outcome":
        result.evaluation = EvaluationResult(outcome_reward=0.5, metadata={"because": "so"})
    if reward == "traces" and built.traces:
        result.evaluation = EvaluationResult(trace_rewards=[0.25 * at for at in range(len(built.traces))])
    if result.evaluation is not None:
        result.evaluator = "mine:Own"
        spread(result.evaluation, built.traces)
    return session_result(result, "t", 3)


@given(session=random_sessions)
@settings(max_examples=50)
def test_nothing_of_another_attempt_is_named_as_trainable_by_its_ending(session: RandomSession):
    with tempfile.TemporaryDirectory() as place:
        log, _ = session.write(Path(place))
    ending = TABLE[Termination.INFRASTRUCTURE]
    built = build(load_builder(StrategySpec()), log, ending, include_auxiliary=False)
    result = discarded(as_the_gateway(built, Termination.DONE, "outcome"), built, attempt=1)
    assert result.metadata == {
        "session_index": 3,
        "attempt": 1,
        "termination": "attempt_discarded",
        "fault": "attempt_discarded",
    }
    assert result.error == "attempt 1; accepted was 2"
    assert node_result(result).termination is Termination.INFRASTRUCTURE
    assert run_termination(result) is None


# The command, over the real chain


@pytest.fixture(scope="module")
def tasks(chain: Chain, engine: ScriptedEngine) -> Chain:
    """forks-*: three calls, the last of which does not go on from the others. limited, late: other endings."""
    for strategy in BUILDERS:
        fields = {"builder": {"strategy": strategy}, "num_samples": 2, **PASSES}
        chain.run(f"forks-{strategy}", **fields, **scripted(*FORKING))
    chain.run("limited", limits={"turns": 1}, **PASSES, **scripted(*FORKING))
    chain.run("late", timeout_seconds=2, **PASSES, **scripted(("call", "hello"), ("sleep", 600)))
    chain.run("unbuilt", num_samples=2, **PASSES, **BROKEN, **scripted(*FORKING))
    chain.run("silent", **PASSES, **scripted(("exit", 0)))
    return chain


@pytest.mark.parametrize("task", ["forks-prefix_merging", "forks-per_request", "limited", "late"])
def test_the_tasks_own_builder_gives_the_stored_bytes(tasks: Chain, task, tmp_path):
    done = at(tasks, "rebuild", task, "--out", tmp_path / "new.msgpack", "--json")
    assert done.exit_code == 0, done.stderr
    assert {row["what"] for row in rows(done).values()} == {"same"}
    files = stored(tasks, task)
    assert [to_msgpack(result) for result in packed(tmp_path / "new.msgpack")] == [f.read_bytes() for f in files]


def test_another_builder_is_compared_with_what_is_stored(tasks: Chain, tmp_path):
    before = [path.read_bytes() for path in stored(tasks, "forks-prefix_merging")]
    done = at(tasks, "rebuild", "forks-prefix_merging", "--builder", "per_request", "--out", tmp_path / "new.json")
    assert done.exit_code == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["2", "→", "3", "9", "9", "0", "1", "changed"] in [line[1:] for line in lines]
    assert ["all", "4", "→", "6", "18", "18", "0", "1", "2", "sessions"] in lines
    assert f"saved: {tmp_path / 'new.json'}" in done.stdout
    new = from_json((tmp_path / "new.json").read_bytes(), list[SessionResult])
    assert [[trace.reward for trace in result.trajectory.traces] for result in new] == [[1.0] * 3] * 2
    assert [path.read_bytes() for path in stored(tasks, "forks-prefix_merging")] == before, "the server keeps its own"


def test_a_session_by_name_and_as_lines(tasks: Chain, tmp_path):
    session = stored(tasks, "forks-per_request")[1].name.split(".")[0]
    done = at(tasks, "rebuild", session, session, "limited", "--out", tmp_path / "new.jsonl", "--json")
    assert done.exit_code == 0, done.stderr
    lines = (tmp_path / "new.jsonl").read_bytes().splitlines()
    assert [from_json(line, SessionResult).task_id for line in lines] == ["forks-per_request", "limited"]
    assert json.loads(done.stdout)["totals"]["after"]["traces"] == 4


def test_a_session_whose_builder_failed_is_built_and_then_scored(tasks: Chain, tmp_path):
    new, scored = tmp_path / "new.msgpack", tmp_path / "scored.msgpack"
    assert at(tasks, "rebuild", "unbuilt", "--builder", "prefix_merging", "--out", new).exit_code == 0
    for result in packed(new):
        assert (result.status, result.error) == ("COMPLETED", None)
        assert result.metadata["termination"] == result.trajectory.metadata["termination"] == "done"
        assert [trace.reward for trace in result.trajectory.traces] == [None, None]
    done = at(tasks, "rescore", "--in", new, "--evaluator", "session_completed", "--out", scored)
    assert done.exit_code == 0, done.stderr
    assert [trace.reward for result in packed(scored) for trace in result.trajectory.traces] == [1.0] * 4


def test_a_builder_that_fails_again_is_named_a_session(tasks: Chain, tmp_path):
    done = at(tasks, "rebuild", "unbuilt", "limited", "--out", tmp_path / "new.json", "--json")
    assert done.exit_code == 1
    assert [row["what"] for row in rows(done).values()] == ["failed", "failed", "same"]
    assert "the builder raised KeyError" in next(iter(rows(done).values()))["why"]
    assert len(json.loads((tmp_path / "new.json").read_bytes())) == 1


def test_an_ending_without_a_trajectory_is_kept_as_it_is(tasks: Chain, tmp_path):
    done = at(tasks, "rebuild", "silent", "--builder", "per_request", "--out", tmp_path / "new.msgpack")
    assert done.exit_code == 0, done.stderr
    assert "kept: no_calls" in done.stdout
    assert to_msgpack(packed(tmp_path / "new.msgpack")[0]) == stored(tasks, "silent")[0].read_bytes()


def test_what_a_helper_model_sampled_can_be_trained_after_all(tasks: Chain):
    fields = scripted(("call", "hello"))
    (harness,) = fields["runtime"]["prepare"]
    harness["content"] = harness["content"].replace('"policy"', '"policy-aux"')
    tasks.run("helper", **PASSES, **fields)
    for words, trainable in ((["--include-auxiliary"], 3), (["--no-include-auxiliary"], 0), ([], 0)):
        done = at(tasks, "rebuild", "helper", *words, "--json")
        assert json.loads(done.stdout)["totals"]["after"]["trainable"] == trainable


@pytest.mark.slow
def test_another_attempt_is_built_and_not_to_be_trained(tasks: Chain, engine: ScriptedEngine, tmp_path):
    engine.script({"text": "first"}, *[{"fault": "500"}] * 6)
    (result,) = tasks.run("twice", seconds=120, **PASSES, **scripted(*FORKING))
    assert result["metadata"]["attempt"] == 2
    out = tmp_path / "new.msgpack"
    done = at(tasks, "rebuild", "twice", "--attempt", "1", "--out", out)
    assert done.exit_code == 0, done.stderr
    (new,) = packed(out)
    assert (new.status, new.metadata["attempt"], new.metadata["termination"]) == ("ERROR", 1, "attempt_discarded")
    assert len(new.trajectory.traces[0].response_ids) > 0
    assert at(tasks, "rebuild", "twice", "--attempt", "2", "--json").exit_code == 0
    missing = at(tasks, "rebuild", "twice", "--attempt", "3", "--json")
    assert missing.exit_code == 1
    assert "no sealed log of attempt 3 is here" in rows(missing)[new.session_id]["why"]


def test_logs_that_cannot_be_read_are_named_and_the_others_go_on(engine: ScriptedEngine, tmp_path):
    data = tmp_path / "data"
    with polar_serve(data, engine.url, "--run-workers=4") as chain:
        chain.run("group", num_samples=4, **PASSES, **scripted(("call", "hello")))
        results = stored(chain, "group")
        gone, cut, torn, whole = (chain.data / "logs" / path.with_suffix(".zst").name for path in results)
    gone.unlink()
    cut.write_bytes(cut.read_bytes()[:-20])
    torn.write_bytes(zstandard.compress(zstandard.decompress(torn.read_bytes())[:-5]))
    done = inside("rebuild", "group", "--data", data, "--out", tmp_path / "new.jsonl", "--json")
    assert done.exit_code == 1
    why = {session: row["why"] for session, row in rows(done).items()}
    assert "no sealed log of attempt 1 is here" in why[gone.name.split(".")[0]]
    assert "its log is damaged: " in why[cut.name.split(".")[0]]
    assert "damaged" in why[torn.name.split(".")[0]]
    assert why[whole.name.split(".")[0]] is None
    assert len((tmp_path / "new.jsonl").read_bytes().splitlines()) == 1
    told = inside("rebuild", "group", "--data", data)
    assert f"{torn.name.split('.')[0]}: its log is damaged" in told.stdout


def test_a_session_that_is_not_over_is_named(tasks: Chain):
    assert tasks.submit("going", **scripted(("call", "hello"), ("sleep", 600))).status_code == 200
    until(lambda: tasks.stage("going") == ["RUNNING"])
    done = at(tasks, "rebuild", "going")
    tasks.http.delete("/rollout/task/going")
    assert done.exit_code == 1
    assert "the session is not over: RUNNING" in done.stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["no-such-task"], "no task, session or file 'no-such-task' here"),
        (["limited", "no-such-task"], "no-such-task"),
        (["limited", "--builder", "best"], "unknown builder 'best': known are per_request, prefix_merging"),
        (["limited", "--builder", "no.such:Builder"], "'no.such:Builder' cannot be imported"),
        (
            ["limited", "--builder", "per_request", "--config", "depth=3"],
            "per_request has no settings: leave out depth",
        ),
        (["limited", "--config", "depth"], "write it as key=value"),
        (["limited", "--out", "/no/such/folder/new.json"], "--out /no/such/folder/new.json cannot be written: No such"),
        (["limited", "--out", "/tmp"], "--out /tmp is a folder"),
        (["limited", "--out", "new.parquet"], "one of .json, .jsonl, .msgpack"),
        (["limited", "--attempt", "0"], "--attempt"),
    ],
)
def test_a_mistake_is_named_before_the_work_begins(tasks: Chain, words, said):
    done = at(tasks, "rebuild", *words)
    assert done.exit_code == 2, done.output
    assert said in done.stderr
    assert not done.stdout


def test_nothing_is_left_of_a_file_that_was_not_finished(tasks: Chain, tmp_path):
    (tmp_path / "new.json").write_text("as it was")
    done = at(tasks, "rebuild", "limited", "no-such-task", "--out", tmp_path / "new.json")
    assert done.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["new.json"]
    assert (tmp_path / "new.json").read_text() == "as it was"
