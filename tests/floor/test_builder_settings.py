"""A setting that no builder reads is refused, not ignored."""

from __future__ import annotations

import pytest

from polar.errors import TaskFault
from polar.requests import StrategySpec
from polar.trajectory import BUILDERS, load_builder


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_settings_of_a_builder_that_has_none_are_named(name: str) -> None:
    with pytest.raises(TaskFault, match=r"builder\.config: .* leave out max_traces"):
        load_builder(StrategySpec(strategy=name, config={"max_traces": 3}))
