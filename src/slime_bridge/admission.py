"""How many groups may be submitted now: never more than the trainer can use before they are stale."""

from __future__ import annotations


def admit(*, requested: int, in_flight: int, finished: int, batch: int, level: int, prefetch: bool) -> int:
    """New groups to submit, ≥ 0.

    in_flight + finished are the groups owned (finished: accepted, not yet returned). Without prefetch they stay within
    the current request (`requested`, 0 between calls) and within batch × level; with prefetch within batch × level,
    between calls too. `requested` ≤ batch × level, or it could never be met.
    """
    bound = batch * level if prefetch else min(requested, batch * level)
    return max(0, bound - in_flight - finished)
