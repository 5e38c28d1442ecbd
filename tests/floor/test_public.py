"""What stands in the public metadata is ours to say."""

from __future__ import annotations

from polar.nodeapi import NodeResult
from polar.public import session_result
from polar.records import EvaluationResult, SessionStatus, Termination


def test_an_evaluators_own_metadata_never_hides_the_reward():
    claims = {"outcome_reward": 1.0, "trace_rewards": [9.0], "strategy": "another", "because": "so"}
    ended = NodeResult(
        session_id="s",
        attempt=1,
        node_id="n",
        epoch=1,
        status=SessionStatus.COMPLETED,
        termination=Termination.DONE,
        traces=[],
        evaluation=EvaluationResult(outcome_reward=0.25, metadata=claims),
        evaluator="command",
    )
    told = session_result(ended, "t", 0).trajectory.metadata["evaluation"]
    expected = {"strategy": "command", "outcome_reward": 0.25, "trace_rewards": None, "because": "so"}
    assert told == expected
