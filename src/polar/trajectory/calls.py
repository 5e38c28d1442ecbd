"""What one call's record says by itself: whether it was answered, and why it may not be trained."""

from __future__ import annotations

import numpy as np

from polar.records import Exclusion
from polar.sessionlog import Call

NO_LOGPROB = -9999.0
"""what engines put where they have none; everything at or below it counts as missing"""

_CUT_OFF = ("abort", "error")


def answered(call: Call) -> bool:
    finished = call.finished is not None and call.finished.finish_reason not in _CUT_OFF
    return finished or len(call.ids) > 0


def usable_logprobs(call: Call) -> bool:
    """Whether every sampled token has a logprob that may be trained on."""
    values = call.logprobs
    return values is not None and bool(np.all(np.isfinite(values) & (values > NO_LOGPROB)))


def exclusion(call: Call, *, continued: bool, include_auxiliary: bool = False) -> Exclusion | None:
    """Why the call's sampled tokens may not be trained. `continued`: a later call's prompt goes on from its answer, so
    the harness had it. The first that holds: over limit > auxiliary > aborted > unknown context > undelivered."""
    finished = call.finished
    if finished is not None and finished.over_limit:
        return Exclusion.OVER_LIMIT
    if call.opened.auxiliary and not include_auxiliary:
        return Exclusion.AUXILIARY_CALL
    if not continued and (finished is None or finished.finish_reason in _CUT_OFF):
        return Exclusion.ABORTED
    if call.prompt is None:
        return Exclusion.UNKNOWN_CONTEXT
    if not continued and not call.delivered:
        return Exclusion.UNDELIVERED
    return None
