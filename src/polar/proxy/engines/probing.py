"""What a probe concludes from answers of one token each."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from polar.errors import EngineFault, PolarError
from polar.protocols import EngineFacts
from polar.proxy.engines.http import PROBE_SECONDS
from polar.records import LogprobMode

QUESTION = (1,)
"""ids that every vocabulary has"""
LIES = "engine_lies"
_TEMPERATURES = (0.1, 1.0, 2.0)
"""a model that is nearly sure, and one that finds all nearly alike, tell at one of them; no engine takes more"""
_SAME = 0.05
"""two bf16 passes over one prompt differ by less"""
LogprobAt = Callable[[float], Awaitable[float | None]]
"""the likeliest token's logprob at a temperature; None: not told"""


async def probed(facts: EngineFacts, asking: Awaitable[None], base_url: str) -> EngineFacts:
    """`facts` as `asking` fills them in, in under 5 s, with what went wrong as their `problem`."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            await asking
            facts.healthy = True
    except TimeoutError:
        facts.problem = (
            f"the engine {base_url} did not answer a 1-token request in {PROBE_SECONDS:g} s. Is it still loading, "
            "overloaded, or hanging?"
        )
    except PolarError as fault:
        facts.problem = fault.message
        if fault.name != LIES:
            facts.problem += f". Is it up, and is the URL that of an engine with {facts.route}?"
    return facts


async def mode_of(likeliest: LogprobAt, *, behind_top_k: bool) -> LogprobMode | None:
    """Of which distribution an engine's logprobs are. None where it does not say, or the model is too sure to tell.

    `behind_top_k`: asked where top_k leaves no other token, which then has exactly 0 where logprobs are of what is
    left. Raises EngineFault `engine_lies` for what is no logprob.
    """
    told = await asyncio.gather(*(likeliest(temperature) for temperature in _TEMPERATURES))
    known = [value for value in told if value is not None]
    if len(known) < len(told):
        return None
    if max(known) > 0:
        raise EngineFault(
            f"engine returns logits for logprobs ({max(known):.2f}): start it with --logprobs-mode processed_logprobs",
            name=LIES,
        )
    if behind_top_k and not any(known):
        return LogprobMode.PROCESSED
    if max(known) - min(known) >= _SAME:
        return LogprobMode.SAMPLING_TEMPERATURE
    return LogprobMode.RAW if min(known) <= -_SAME else None
