"""The builders' rules once more, from materialised lists and in quadratic time; shares no code with them."""

from __future__ import annotations

import math
from collections.abc import Container

from peers.random_sessions import TrueCall, TrueSession


def starts_with(longer: list[int], shorter: list[int]) -> bool:
    return longer[: len(shorter)] == shorter


def usable(call: TrueCall) -> bool:
    if call.mode == "raw" and call.temperature not in (0, 1):
        return False
    if call.mode == "processed" and call.top_k > 0:
        return False
    return call.aligned and all(math.isfinite(value) and value > -9999.0 for value in call.logprobs)


def continued_by(session: TrueSession, call: TrueCall, among: Container[int] | None = None) -> int | None:
    if call.prompt is None:
        return None
    kept = [
        (len(other.sequence), other.number == call.expected, other.number == call.base, other.delivered, other.number)
        for other in session.calls[: call.number - 1]
        if other.prompt is not None
        and other.sampled
        and (among is None or other.number in among)
        and starts_with(call.prompt, other.sequence)
    ]
    return max(kept)[-1] if kept else None


def exclusions(session: TrueSession, include_auxiliary: bool) -> dict[int, str]:
    continued = {continued_by(session, call) for call in session.calls}
    return {
        call.number: reason
        for call in session.calls
        if call.sampled and (reason := _exclusion(call, call.number in continued, include_auxiliary))
    }


def _exclusion(call: TrueCall, continued: bool, include_auxiliary: bool) -> str | None:
    holds = {
        "over_limit": call.over_limit,
        "auxiliary_call": call.auxiliary and not include_auxiliary,
        "aborted": call.finish in (None, "abort", "error") and not continued,
        "constrained": call.constrained,
        "images": call.images,
        "unknown_context": call.prompt is None,
        "undelivered": not call.delivered and not continued,
    }
    return next((reason for reason, held in holds.items() if held), None)


def merged(session: TrueSession, trainable: list[int]) -> list[list[int]]:
    """Chains of call numbers, in the order of their first calls."""
    chains: list[list[int]] = []
    for number in trainable:
        before = continued_by(session, session.call(number), trainable)
        for chain in chains:
            if chain[-1] == before and usable(session.call(before)):
                chain.append(number)
                break
        else:
            chains.append([number])
    return chains


def counts(session: TrueSession) -> dict[str, int]:
    answered = [call for call in session.calls if call.sampled or call.finish in ("stop", "length", "tool_calls")]
    forks = [call for call in answered if _forks(session, call)]
    return {
        "completions": len(answered),
        "continued": sum(call.source == "continued" for call in answered),
        "rendered": sum(call.source == "rendered" for call in answered),
        "rendered_reasoning": sum(call.why == "reasoning" for call in answered),
        "rendered_no_bridge": sum(call.why == "no_bridge" for call in answered),
        "forks": len(forks),
        "drift": sum(call.source == "engine" for call in forks),
        "joined": sum(call.joined for call in session.calls),
        "refused": session.refused,
        "prompt_tokens": sum(len(call.prompt or []) for call in answered),
        "prefilled_again": sum(_other_than(call.prompt, session.call(call.expected).sequence) for call in forks),
        "missing_logprobs": sum(bool(call.sampled) and not usable(call) for call in answered),
        "without_ids": sum(_without_ids(call) for call in answered),
        "reported_prompt_tokens": 3 * sum(_without_ids(call) for call in answered),
        "reported_completion_tokens": 2 * sum(_without_ids(call) for call in answered),
    }


def _without_ids(call: TrueCall) -> bool:
    return call.prompt is None and not call.sampled


def _forks(session: TrueSession, call: TrueCall) -> bool:
    if call.prompt is None or call.expected is None:
        return False
    expected = session.call(call.expected)
    return expected.prompt is not None and not starts_with(call.prompt, expected.sequence)


def _other_than(prompt: list[int], before: list[int]) -> int:
    differs = [at for at, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b]
    return min(len(prompt), len(before)) - differs[0] if differs else 0
