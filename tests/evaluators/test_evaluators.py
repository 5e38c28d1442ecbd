"""From a finished session to a reward, in real sandboxes; and what becomes an EvaluationFault, never a 0."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import EvaluationFault, TaskFault
from polar.evaluators import load_evaluator
from polar.evaluators.command import parse_reward
from polar.evaluators.test_on_output import parse_outcomes
from polar.protocols import EvaluationContext, Runtime
from polar.records import EvaluationResult, SessionStatus, Termination, Trajectory
from polar.requests import AgentSpec, EvaluatorSpec, ExecInput, TaskRequest
from sandboxing import both, run, sh, standing

OUTCOMES = ["PASSED", "FAILED", "ERROR", "SKIPPED"]


def context(
    runtime: Runtime | None, *, termination: Termination = Termination.DONE, timeout: float = 20
) -> EvaluationContext:
    agent = AgentSpec(harness="shell", custom_shell=ExecInput(command="true"))
    return EvaluationContext(
        task=TaskRequest(task_id="t", instruction="do it", agent=agent),
        session_id="s",
        status=SessionStatus.COMPLETED,
        termination=termination,
        trajectory=Trajectory(status=SessionStatus.COMPLETED),
        runtime=runtime,
        timeout=timeout,
    )


async def evaluate(
    runtime: Runtime | None, strategy: str, env: dict[str, str] | None = None, *, timeout: float = 20, **config: Any
) -> EvaluationResult:
    evaluator = load_evaluator(EvaluatorSpec(strategy=strategy, config=config, env=env or {}))
    return await evaluator.evaluate(context(runtime, timeout=timeout))


@pytest.mark.parametrize("termination", Termination)
def test_session_completed_is_1_for_done_alone(termination):
    evaluator = load_evaluator(EvaluatorSpec(strategy="session_completed"))
    assert not evaluator.needs_runtime
    result = run(evaluator.evaluate(context(None, termination=termination)))
    assert result.outcome_reward == (1.0 if termination is Termination.DONE else 0.0)


@both
def test_a_commands_exit_code_is_the_reward(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            await sh(box, "echo apple > answer.txt")
            right = await evaluate(box, "command", command='grep -qx "$WORD" answer.txt', env={"WORD": "apple"})
            wrong = await evaluate(box, "command", command="grep -qx pear answer.txt")
            elsewhere = await evaluate(box, "command", command="test $PWD = /", cwd="/")
            assert [each.outcome_reward for each in (right, wrong, elsewhere)] == [1.0, 0.0, 1.0]
            assert wrong.metadata == {"exit_code": 1}
            with pytest.raises(EvaluationFault, match=r"cannot be run: .*no-such-scorer"):
                await evaluate(box, "command", command="no-such-scorer")

    run(story())


@both
def test_a_reward_file_is_the_commands_own(tmp_path, kind):
    """What the agent wrote there beforehand is gone when the command starts."""

    async def story():
        async with standing(tmp_path, kind) as box:
            path = f"{box.session_dir}/reward"
            await sh(box, f"echo 1.0 > {path}")
            write = f'test ! -s {path} && echo \'{{"reward": 0.25, "other": 1}}\' > {path}'
            assert (await evaluate(box, "command", command=write, reward_file=path)).outcome_reward == 0.25
            with pytest.raises(EvaluationFault, match=f"wrote nothing to reward_file {path}; .*exit code 0"):
                await evaluate(box, "command", command="true", reward_file=path)
            for cwd in (None, box.session_dir, "."):
                written = await evaluate(box, "command", command="echo 3 > own", cwd=cwd, reward_file="own")
                assert written.outcome_reward == 3.0, "relative to where the command runs"
            with pytest.raises(EvaluationFault, match=r"holds nan.*exit code 3: said"):
                await evaluate(box, "command", command=f"echo nan > {path}; echo said; exit 3", reward_file=path)
            with pytest.raises(EvaluationFault, match="cannot be read"):
                await evaluate(box, "command", command=f"rm {path}", reward_file=path)
            with pytest.raises(EvaluationFault, match="cannot be read"):
                await evaluate(box, "command", command=rf"printf '\377' > {path}", reward_file=path)
            with pytest.raises(EvaluationFault, match="cannot be emptied"):
                await evaluate(box, "command", command="true", reward_file="/proc/none/reward")

    run(story())


@pytest.mark.parametrize(
    ("text", "reward"),
    [("1", 1.0), (" 0.5\n", 0.5), ("-2", -2.0), ('{"reward": 3}', 3.0), ('{"a": 1, "b": 0}', 0.5), ("1e3", 1000.0)],
)
def test_a_reward_is_a_number_a_named_one_or_a_mean(text, reward):
    assert parse_reward(text) == reward


@pytest.mark.parametrize(
    "text",
    ["", "nan", "NaN", "Infinity", "-Infinity", "1e999", "true", "null", "[1]", '"1"', "{}", '{"reward": null}',
     '{"reward": NaN}', '{"a": 1, "b": "x"}', "one", pytest.param("[" * 100_000, id="deep"), '{"reward": true}'],
)  # fmt: skip
def test_anything_else_is_no_reward(text):
    with pytest.raises(ValueError):
        parse_reward(text)


PYTEST_OUTPUT = """
\x1b[32mtests/test_a.py::test_one PASSED\x1b[0m                [ 33%]
tests/test_a.py::test_two[a b] FAILED                          [ 66%]
tests/test_a.py::test_three SKIPPED (no network)               [100%]
=========================== short test summary info ===========================
FAILED tests/test_a.py::test_two[a b] - AssertionError: 1 != 2
ERROR tests/test_b.py - ImportError
2 passed, 1 FAILED in total, they say
"""


def test_outcomes_are_read_from_both_of_pytests_forms():
    assert parse_outcomes(PYTEST_OUTPUT) == {
        "tests/test_a.py::test_one": "PASSED",
        "tests/test_a.py::test_two[a b]": "FAILED",
        "tests/test_a.py::test_three": "SKIPPED",
        "tests/test_b.py": "ERROR",
    }


NAMES = st.from_regex(r"[a-z_]{1,8}\.py::[a-z_]{1,8}", fullmatch=True)


@given(st.dictionaries(NAMES, st.sampled_from(OUTCOMES)), st.data())
def test_every_named_outcome_is_found(outcomes, data):
    forms = ["{1} {0}", "{0} {1}", "{0} {1}   [ 12%]", "{1} {0} - it said so"]
    written = [data.draw(st.sampled_from(forms)).format(*item) for item in outcomes.items()]
    noise = data.draw(st.lists(st.sampled_from(["", "collected 3 items", "=====", "3 passed"])))
    assert parse_outcomes("\n".join([*noise, *written])) == outcomes


@both
def test_on_output_compares_every_outcome(tmp_path, kind):
    async def story():
        async with standing(tmp_path, kind) as box:
            command = "echo 'PASSED a'; echo 'FAILED b'; exit 1"
            for expected, reward in (
                ({"a": "PASSED", "b": "FAILED"}, 1.0),
                ({"a": "PASSED"}, 0.0),
                ({"a": "PASSED", "b": "PASSED"}, 0.0),
                ({"a": "PASSED", "b": "FAILED", "c": "PASSED"}, 0.0),
            ):
                for form in (expected, json.dumps(expected)):
                    config = {"test_command": command, "expected_output_json": form}
                    result = await evaluate(box, "test_on_output", **config)
                    assert result.outcome_reward == reward, expected
            assert result.metadata == {"tests": 2, "exit_code": 1, "differing": ["c"]}
            nothing = await evaluate(box, "test_on_output", test_command="true", expected_output_json={})
            assert nothing.outcome_reward == 0.0

    run(story())


@both
def test_a_scorer_that_never_ends_is_killed_and_blamed(tmp_path, kind):
    """Case 44: it sleeps for ever, ignores SIGTERM and forks; the others finish, and nothing of it is left."""
    stubborn = "trap '' TERM; (setsid sh -c 'while :; do date >> beat; sleep 0.05; done' &); echo half; sleep 1000"

    async def story():
        async with standing(tmp_path, kind) as box, standing(tmp_path, kind) as other:
            stuck = asyncio.create_task(evaluate(box, "command", command=stubborn, timeout=2))
            others = [evaluate(other, "command", command=f"sleep 0.1; exit {n % 2}") for n in range(6)]
            assert [each.outcome_reward for each in await asyncio.gather(*others)] == [1.0, 0.0] * 3
            with pytest.raises(EvaluationFault, match="did not end within 2 s: half"):
                await stuck
            size = (await sh(box, "cat beat | wc -l")).output
            await asyncio.sleep(0.3)
            assert (await sh(box, "cat beat | wc -l")).output == size

    run(story())


def test_without_a_sandbox_there_is_nothing_to_run_in():
    with pytest.raises(EvaluationFault, match="needs a sandbox"):
        run(evaluate(None, "command", command="true"))


@pytest.mark.parametrize(
    ("strategy", "config", "named"),
    [
        ("nothing", {}, "unknown evaluator 'nothing': known are command, session_completed, test_on_output"),
        ("command", {}, "evaluator.config.command: is missing"),
        ("command", {"command": "true", "rewardfile": "x"}, "evaluator.config.rewardfile: there is no such key"),
        ("session_completed", {"x": 1}, "evaluator.config.x"),
        ("test_on_output", {"test_command": "t"}, "expected_output_json: is missing"),
        ("test_on_output", {"test_command": "t", "expected_output_json": "{"}, "expected_output_json"),
        ("test_on_output", {"test_command": "t", "expected_output_json": {"a": 1}}, "expected_output_json.a"),
        ("no.such.module:Class", {}, "no.such.module:Class"),
    ],
)
def test_a_wrong_evaluator_is_refused_by_name(strategy, config, named):
    with pytest.raises(TaskFault, match=named):
        load_evaluator(EvaluatorSpec(strategy=strategy, config=config))
    assert load_evaluator(EvaluatorSpec(strategy="polar.evaluators.command:Command", config={"command": "true"}))
