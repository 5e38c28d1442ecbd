"""Case 58: groups of 3, 2, 3 and 1 with failures: a fixed stride mixes their prompts, and (r − mean) / eps explodes."""

from __future__ import annotations

import pytest

from slime_bridge.shaping import ScoredTrace, shape


def one_trace_each(rewards: list[float], group: int = 0) -> list[ScoredTrace]:
    return [ScoredTrace(group, (group, index), reward, True) for index, reward in enumerate(rewards)]


@pytest.mark.parametrize("std", [False, True])
def test_uneven_groups_with_failures_never_mix(std: bool):
    sizes = [3, 2, 3, 1]
    traces = [trace for group, size in enumerate(sizes) for trace in one_trace_each([1.0] + [0.0] * (size - 1), group)]
    failed = ScoredTrace(1, "failed", 0.0, False)
    shaped = shape([*traces, failed], std=std)
    assert shaped[-1] == 0.0
    assert shaped[-2] == 0.0, "a group of one has no baseline"
    for group, size in enumerate(sizes[:3]):
        start = sum(sizes[:group])
        alone = shape(one_trace_each([1.0] + [0.0] * (size - 1)), std=std)
        assert shaped[start : start + size] == pytest.approx(alone)
        assert max(map(abs, alone)) < 3
