"""The rollout function as Slime's plugin contract calls it: with args None, and one sample a session."""

from __future__ import annotations

import os
from itertools import chain
from typing import Any

from tests.bridge.making import arguments

from slime_bridge.rollout import generate_rollout_polar_async


def generate(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    args = args or arguments(
        polar_rollout_url=os.environ["POLAR_TEST_SERVER"],
        eval_prompt_data=["held_out", os.environ["POLAR_TEST_PROMPTS"]],
        polar_task_id_template=f"contract-{rollout_id}-{{sample.index}}",
    )
    output = generate_rollout_polar_async(args, rollout_id, data_source, evaluation=evaluation)
    if not evaluation:
        output.samples = [list(chain.from_iterable(group)) for group in output.samples]
    return output
