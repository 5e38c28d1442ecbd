"""`polar why`: every reason has words, and the tokens of a task are all accounted for."""

from __future__ import annotations

import numpy as np
import pytest

from polar.cli.reasons import ENDINGS, EXCLUSIONS, report, untrained
from polar.records import (
    Exclusion,
    SessionResult,
    SessionStatus,
    TaskState,
    TaskStatus,
    Termination,
    Trace,
    Trajectory,
)


def trace(trainable=3, logprobs=True, reward=1.0):
    return Trace(
        prompt_ids=np.arange(2),
        response_ids=np.arange(4),
        loss_mask=[1] * trainable + [0] * (4 - trainable),
        response_logprobs=np.full(4, -0.5) if logprobs else None,
        reward=reward,
    )


def session(name, termination="done", status=SessionStatus.COMPLETED, traces=(), error=None, **tokens):
    trajectory = (
        Trajectory(status=status, traces=list(traces), metadata={"tokens": tokens}) if traces or tokens else None
    )
    metadata = {"termination": termination}
    return SessionResult(
        session_id=name, task_id="t", status=status, trajectory=trajectory, metadata=metadata, error=error
    )


def why(*results, state=TaskState.COMPLETED, **fields):
    status = TaskStatus(task_id="t", status=state, total_sessions=len(results), results=list(results), **fields)
    return report(status)


def findings(*results):
    return {(item.kind, item.reason): item for item in why(*results).findings}


def test_every_ending_and_every_exclusion_has_words():
    assert set(ENDINGS) == set(Termination)
    assert set(EXCLUSIONS) == set(Exclusion)


def test_a_good_session_gives_nothing_to_explain():
    assert findings(session("s0", traces=[trace()], sampled=3, trainable=3)) == {}


def test_exclusions_are_summed_by_reason_with_their_sessions():
    first = session("s0", traces=[trace()], sampled=10, trainable=3, excluded={"aborted": 5, "undelivered": 2})
    second = session("s1", traces=[trace()], sampled=7, trainable=3, excluded={"aborted": 4})
    said = why(first, second)
    aborted = next(item for item in said.findings if item.reason == "aborted")
    assert (aborted.tokens, aborted.sessions) == (9, ["s0", "s1"])
    excluded = sum(item.tokens for item in said.findings if item.kind == "excluded")
    assert said.sampled == said.trainable + excluded


def test_a_fault_goes_by_its_name_with_every_distinct_error():
    results = [
        session(f"s{number}", "engine_down", SessionStatus.ERROR, error=error)
        for number, error in enumerate(("refused", "refused", "hung"))
    ]
    found = findings(*results)["ending", "engine_down"]
    assert found.meaning == ENDINGS[Termination.INFRASTRUCTURE]
    assert (found.sessions, found.errors) == (["s0", "s1", "s2"], ["refused", "hung"])


def test_lost_logprobs_are_named_with_their_tokens():
    found = findings(session("s0", traces=[trace(), trace(2, logprobs=False)], sampled=5, trainable=5))
    assert found["logprobs", "logprob_error"].tokens == 2


@pytest.mark.parametrize(
    ("given", "kind", "reason"),
    [
        (session("s0", traces=[trace(0)], sampled=4, excluded={"auxiliary_call": 4}), "untrained", "zero_trainable"),
        (session("s0", traces=[trace(reward=None)], sampled=3, trainable=3), "reward", "no_reward"),
        (session("s0", "agent_timeout", SessionStatus.TIMEOUT, [trace()]), "ending", "agent_timeout"),
        (session("s0", "no_calls", SessionStatus.ERROR), "ending", "no_calls"),
    ],
)
def test_what_is_not_trained_is_named(given, kind, reason):
    assert findings(given)[kind, reason].sessions == ["s0"]


def test_what_a_task_waits_for_is_passed_on():
    said = why(state=TaskState.RUNNING, waiting_for="a gateway with the runtime docker")
    assert said.waiting_for == "a gateway with the runtime docker"


def test_what_will_not_be_trained_is_named_by_its_ending_or_by_having_no_token():
    assert untrained(session("s0", traces=[trace()])) is None
    assert untrained(session("s1", "engine_down", SessionStatus.ERROR)) == "engine_down"
    assert untrained(session("s2", "agent_timeout", SessionStatus.TIMEOUT, traces=[trace()])) == "agent_timeout"
    assert untrained(session("s3", traces=[trace(trainable=0)])) == "zero_trainable"
