"""A stage's clock, in virtual time: exact to a twentieth of a second, whatever the work does and however often the
proxy is paused meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polar.errors import ServerFault
from polar.gateway.budgets import StageTimeout, within

GRAIN = 0.06


class VirtualTime(asyncio.SelectorEventLoop):
    """Time passes only by being waited for, and then at once."""

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        select = self._selector.select
        self._selector.select = lambda timeout: select(self._pass(timeout))  # type: ignore[method-assign]

    def time(self) -> float:
        return self._now

    def _pass(self, timeout: float | None) -> float:
        self._now += timeout or 0.0
        return 0


def run(story: Coroutine[Any, Any, Any]) -> tuple[Any, float]:
    """What the story returns or raises, and the virtual seconds that it took."""

    async def outcome() -> Any:
        return (await asyncio.gather(story, return_exceptions=True))[0]

    loop = VirtualTime()
    try:
        return loop.run_until_complete(outcome()), loop.time()
    finally:
        loop.close()


def pauses(spans: list[tuple[float, float]]) -> Any:
    """Seconds paused so far, with a pause at each (start, length)."""

    def paused() -> float:
        now = asyncio.get_event_loop().time()
        return sum(min(max(0.0, now - start), length) for start, length in spans)

    return paused


def test_work_that_ends_in_time_keeps_its_result() -> None:
    assert run(within(10, "init", asyncio.sleep(9, "done"), lambda: 0.0)) == ("done", 9)


@given(st.floats(0.1, 1000))
def test_work_that_hangs_is_ended_when_the_budget_is_spent(seconds: float) -> None:
    """Case 45: a start that hangs costs its own budget and no more."""
    fault, took = run(within(seconds, "init", asyncio.sleep(1e6), lambda: 0.0))
    assert isinstance(fault, StageTimeout)
    assert "init" in fault.message
    assert seconds <= took < seconds + GRAIN


@given(st.lists(st.tuples(st.floats(0.1, 5), st.floats(0.1, 60)), max_size=4), st.floats(1, 50))
def test_a_pause_counts_against_nothing(gaps: list[tuple[float, float]], seconds: float) -> None:
    spans, at = [], 0.0
    for gap, length in gaps:
        spans.append((at + gap, length))
        at += gap + length
    _, took = run(within(seconds, "the agent", asyncio.sleep(1e6), pauses(spans)))
    before, left = 0.0, seconds
    for start, length in spans:
        if start - before >= left - 1e-9:
            break
        left -= start - before
        before = start + length
    assert before + left <= took + 1e-6
    assert took < before + left + GRAIN


def test_what_does_not_obey_a_cancellation_is_left_behind() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(1e6)
            except asyncio.CancelledError:
                continue

    async def story() -> Any:
        try:
            await within(5, "init", stubborn(), lambda: 0.0)
        except StageTimeout:
            return asyncio.get_running_loop().time()

    ended, _ = run(story())
    assert 15 <= ended < 15.1


def test_a_cancelled_stage_cancels_its_work() -> None:
    cleared = []

    async def work() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(0.5)
            cleared.append(asyncio.get_running_loop().time())

    async def story() -> None:
        stage = asyncio.create_task(within(100, "the agent", work(), lambda: 0.0))
        await asyncio.sleep(3)
        stage.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stage

    run(story())
    assert cleared == [3.5]


def test_a_second_cancellation_does_not_cut_the_clearing_up_short() -> None:
    cleared = []

    async def work() -> None:
        try:
            await asyncio.sleep(1e6)
        finally:
            await asyncio.sleep(3)
            cleared.append(asyncio.get_running_loop().time())

    async def story() -> float:
        stage = asyncio.create_task(within(100, "init", work(), lambda: 0.0))
        for _ in range(3):
            await asyncio.sleep(1)
            stage.cancel()
        with pytest.raises(asyncio.CancelledError):
            await stage
        return asyncio.get_running_loop().time()

    assert run(story())[0] == 4
    assert cleared == [4]


def test_work_that_cancels_itself_is_a_fault_and_no_cancellation() -> None:
    async def odd() -> None:
        raise asyncio.CancelledError

    fault, _ = run(within(5, "evaluate", odd(), lambda: 0.0))
    assert isinstance(fault, ServerFault)


def test_what_the_work_raises_is_raised() -> None:
    async def broken() -> None:
        raise KeyError("x")

    fault, _ = run(within(5, "init", broken(), lambda: 0.0))
    assert isinstance(fault, KeyError)
