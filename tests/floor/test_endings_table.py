"""The table of endings against what the API's document says, and the order in which facts decide."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polar.endings import EVALUATION_REPLACES, TABLE, RunFacts, SlimeStatus, decide
from polar.records import SessionStatus, Termination

FACTS = st.builds(
    RunFacts,
    stopped=st.sampled_from([None, None, None, Termination.CANCELLED, Termination.EARLY_STOP]),
    fault=st.sampled_from([None, None, "engine_down"]),
    calls=st.integers(0, 2),
    needs_calls=st.booleans(),
    timed_out=st.booleans(),
    limit=st.booleans(),
    context=st.booleans(),
    sandbox_limit=st.booleans(),
    exit_code=st.sampled_from([0, 0, 1, 137]),
)


def test_every_termination_has_a_row() -> None:
    assert set(TABLE) == set(Termination)


def test_only_what_the_policy_did_is_trained() -> None:
    trained = {termination for termination, row in TABLE.items() if row.trained}
    T = Termination
    assert trained == {T.DONE, T.HARNESS_EXIT, T.LIMIT, T.CONTEXT, T.SANDBOX_LIMIT}
    assert all(TABLE[termination].status is SessionStatus.COMPLETED for termination in trained)
    assert trained == EVALUATION_REPLACES


def test_only_infrastructure_is_retried_and_never_trained() -> None:
    retried = {termination for termination, row in TABLE.items() if row.retried}
    assert retried == {Termination.SANDBOX_START, Termination.INFRASTRUCTURE}
    assert all(TABLE[each].slime is SlimeStatus.FAILED and not TABLE[each].builds for each in retried)


def test_a_timeout_is_built_and_not_trained() -> None:
    row = TABLE[Termination.AGENT_TIMEOUT]
    assert (row.status, row.slime, row.builds, row.trained) == (SessionStatus.TIMEOUT, SlimeStatus.ABORTED, True, False)


@given(FACTS)
def test_the_first_fact_that_holds_decides(facts: RunFacts) -> None:
    found = decide(facts)
    if facts.stopped is not None:
        assert found is facts.stopped
    elif facts.fault is not None:
        assert found is Termination.INFRASTRUCTURE
    elif facts.needs_calls and not facts.calls:
        assert found is Termination.NO_CALLS
    elif facts.timed_out:
        assert found is Termination.AGENT_TIMEOUT
    elif facts.limit or facts.context:
        assert found is (Termination.LIMIT if facts.limit else Termination.CONTEXT)
    elif facts.sandbox_limit:
        assert found is Termination.SANDBOX_LIMIT
    else:
        assert found is (Termination.HARNESS_EXIT if facts.exit_code else Termination.DONE)
