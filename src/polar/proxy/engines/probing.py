"""What a probe concludes from answers of one token each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable

from polar.errors import EngineFault, PolarError
from polar.protocols import EngineFacts
from polar.proxy.engines.http import PROBE_SECONDS
from polar.records import LogprobMode

QUESTION = (1,)
"""ids that every vocabulary has"""
HOT = 2.0
"""the highest temperature that all engines take"""
LIES = "engine_lies"
_SAME = 0.05
"""two bf16 passes over one prompt differ by less, the same logits at temperatures 1 and 2 by more"""


async def probed(facts: EngineFacts, asking: Awaitable[None], base_url: str) -> EngineFacts:
    """`facts` as `asking` fills them in, in under 5 s, with what went wrong as their `problem`."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await asking
            facts.healthy = True
    except TimeoutError:
        facts.problem = f"the engine {base_url} did not answer a 1-token request in {PROBE_SECONDS:g} s"
    except PolarError as fault:
        facts.problem = fault.message
        if fault.name != LIES:
            facts.problem += f". Is it up, and is the URL that of an engine with {facts.route}?"
    return facts


def mode_of(likeliest: float, hot: float) -> LogprobMode | None:
    """Of which distribution logprobs are, by the likeliest token's at temperatures 1 and HOT. None where the model is
    too sure of it to tell. Raises EngineFault `engine_lies` for what is no logprob."""
    if max(likeliest, hot) > 0:
        raise EngineFault(
            f"engine returns logits for logprobs ({likeliest:.2f}): start it with --logprobs-mode processed_logprobs",
            name=LIES,
        )
    if abs(hot) < _SAME:
        return None
    return LogprobMode.RAW if abs(likeliest - hot) < _SAME else LogprobMode.SAMPLING_TEMPERATURE
