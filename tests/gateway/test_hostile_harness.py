"""What a harness can do to its sandbox, and what a huge instruction can do to a command line: nothing that costs."""

from __future__ import annotations

from chain import Chain, until
from gateway_processes import processes_with
from peers.harness import scripted


def test_an_instruction_of_a_megabyte_reaches_the_harness_whole(chain: Chain) -> None:
    steps = scripted(("call", "hello"), ("tell", "$SESSION_DIR/instruction.txt"))
    (result,) = chain.run("megabyte", instruction="é" * 500_000, **steps)
    assert result["metadata"]["termination"] == "done"
    assert "1000000" in result["metadata"]["harness_log"]


def test_a_daemon_does_not_outlive_the_run(chain: Chain) -> None:
    """It would write the artifact that the evaluator looks for, if it were alive when the evaluator runs."""
    mark = "argument-of-the-daemon-test"
    steps = scripted(("call", mark), ("daemon", 600))
    (result,) = chain.run("daemon", **steps)
    assert (result["status"], result["metadata"]["termination"]) == ("COMPLETED", "done")
    until(lambda: not processes_with(mark))


def test_a_hundred_megabytes_of_output_cost_neither_the_session_nor_memory(chain: Chain) -> None:
    (result,) = chain.run("loud", **scripted(("call", "hello"), ("shout", 100), ("write", "$ARTIFACTS_DIR/done")))
    assert result["metadata"]["termination"] == "done"
    assert result["trajectory"]["traces"][0]["reward"] == 1.0
    assert len(result["metadata"]["harness_log"]) < 100_000


def test_an_agent_cannot_fake_its_reward_by_answering_late(chain: Chain) -> None:
    """The evaluator sees the sandbox as it was when the budget was spent."""
    steps = scripted(("call", "hello"), ("sleep", 60), ("write", "$ARTIFACTS_DIR/done"))
    (result,) = chain.run("late", timeout_seconds=5, **steps)
    assert result["metadata"]["termination"] == "agent_timeout"
    assert result["trajectory"]["traces"][0]["reward"] == 0.0
