"""The pure rules between data source and trainer: admission, age, and both sides of the ledger."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from slime_bridge.admission import admit
from slime_bridge.ledger import Ledger
from slime_bridge.staleness import PolicyVersions

COUNT = st.integers(0, 12)


@given(in_flight=COUNT, finished=COUNT, batch=st.integers(1, 8), level=st.integers(1, 3), asked=st.booleans())
def test_without_prefetch_what_is_owned_stays_within_the_request(in_flight, finished, batch, level, asked):
    requested = batch if asked else 0
    new = admit(requested=requested, in_flight=in_flight, finished=finished, batch=batch, level=level, prefetch=False)
    assert new >= 0
    if new:
        assert in_flight + finished + new == requested
    if not asked:
        assert new == 0


@given(in_flight=COUNT, finished=COUNT, batch=st.integers(1, 8), level=st.integers(1, 3), asked=st.booleans())
def test_with_prefetch_what_is_owned_stays_within_batch_times_level(in_flight, finished, batch, level, asked):
    new = admit(
        requested=batch if asked else 0,
        in_flight=in_flight,
        finished=finished,
        batch=batch,
        level=level,
        prefetch=True,
    )
    assert new == max(0, batch * level - in_flight - finished)


@given(batch=st.integers(1, 8), level=st.integers(1, 3), prefetch=st.booleans(), data=st.data())
def test_a_request_is_always_met_and_never_overshoots(batch, level, prefetch, data):
    """Replays a call: groups are admitted, and each that arrives is accepted or dropped."""
    in_flight = finished = drops = 0
    while finished < batch:
        new = admit(
            requested=batch, in_flight=in_flight, finished=finished, batch=batch, level=level, prefetch=prefetch
        )
        in_flight += new
        assert 0 < in_flight <= batch * level
        assert in_flight + finished <= batch * (level if prefetch else 1)
        in_flight -= 1
        if drops < 20 and data.draw(st.booleans()):
            drops += 1
        else:
            finished += 1


CALLS = st.lists(st.lists(st.sampled_from(["accepted", "dropped", "given up"]), max_size=12), max_size=6)


@given(batch=st.integers(1, 6), level=st.integers(1, 3), prefetch=st.booleans(), calls=CALLS)
def test_over_many_calls_what_is_owned_stays_within_the_bound_and_every_call_is_met(batch, level, prefetch, calls):
    """Between two calls groups end as `calls` says; within one they do so until it is met, then are accepted."""
    in_flight = finished = 0

    def admitted(requested: int) -> int:
        return admit(
            requested=requested, in_flight=in_flight, finished=finished, batch=batch, level=level, prefetch=prefetch
        )

    for fates in calls:
        within = iter(fates)
        while finished < batch:
            in_flight += admitted(batch)
            assert 0 < in_flight <= batch * level
            assert in_flight + finished <= (batch * level if prefetch else max(batch, finished))
            in_flight -= 1
            finished += next(within, "accepted") == "accepted"
        finished -= batch
        if not prefetch:
            in_flight = 0  # the bridge cancels what is left
        in_flight += admitted(0)
        assert in_flight + finished == (batch * level if prefetch else 0)
        for fate in within:
            if in_flight:
                in_flight -= 1
                finished += fate == "accepted"
                in_flight += admitted(0)
                assert in_flight + finished <= batch * level


def test_age_is_counted_from_the_rollout_in_which_the_oldest_tokens_policy_began():
    versions = PolicyVersions()
    versions.seen("5", 10)
    versions.seen("5", 11)
    versions.seen("6", 12)
    assert versions.age(["6", "5"], submitted=12, consuming=14) == (4, 0)
    assert versions.age(["6"], submitted=11, consuming=14) == (2, 0)


def test_an_unknown_version_falls_back_to_the_submit_stamp_and_is_counted():
    versions = PolicyVersions()
    versions.seen("6", 12)
    assert versions.age(["6", "mixed"], submitted=9, consuming=14) == (5, 1)
    assert versions.age([], submitted=13, consuming=14) == (1, 1)


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["dropped", "accepted", "expired", "handed_over"]), st.integers(0, 50), st.integers(0, 9)
    ),
    max_size=40,
)


@given(EVENTS)
def test_the_ledger_balances_after_every_event(events):
    ledger = Ledger()
    waiting: list[int] = []
    for what, tokens, unused in events:
        if what == "dropped":
            ledger.dropped("failed", tokens)
        elif what == "accepted":
            ledger.accepted(tokens + unused, tokens, Counter({"overlong": unused}))
            waiting.append(tokens)
        elif waiting and what == "expired":
            ledger.expired("stale", waiting.pop())
        elif waiting:
            ledger.handed_over(waiting.pop())
        assert ledger.balanced
    assert (ledger.groups.waiting, ledger.tokens.waiting) == (len(waiting), sum(waiting))
