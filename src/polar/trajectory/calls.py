"""What one call's record says by itself: whether it was answered, and why it may not be trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from polar.records import Exclusion, LogprobMode
from polar.sessionlog import Call, Header

NO_LOGPROB = -9999.0
"""what engines put where they have none; everything at or below it counts as missing"""

_CUT_OFF = ("abort", "error")


def answered(call: Call) -> bool:
    finished = call.finished is not None and call.finished.finish_reason not in _CUT_OFF
    return finished or len(call.ids) > 0


def without_ids(call: Call) -> bool:
    """Whether the engine told neither what it was given nor what it sampled."""
    return call.prompt is None and not len(call.ids)


def usable_logprobs(header: Header, call: Call) -> bool:
    """Whether every sampled token has a logprob that may be trained on."""
    values = call.logprobs
    known = values is not None and bool(np.all(np.isfinite(values) & (values > NO_LOGPROB)))
    return known and _of_the_trained_distribution(header.logprob_mode, call.opened.sampling)


def _of_the_trained_distribution(mode: str | None, sampling: Mapping[str, Any]) -> bool:
    """Whether a trainer, which knows the temperature alone, computes the same (case 18). At 0 every token is certain,
    and engines tell the logprob at 1."""
    if mode == LogprobMode.RAW:
        return sampling.get("temperature", 1.0) in (0, 1)
    if mode == LogprobMode.PROCESSED:
        return sampling.get("top_p", 1) == 1 and sampling.get("top_k", -1) <= 0 and not sampling.get("min_p")
    return True


def exclusion(call: Call, *, continued: bool, include_auxiliary: bool = False) -> Exclusion | None:
    """Why the call's sampled tokens may not be trained. `continued`: a later call's prompt goes on from its answer, so
    the harness had it. The first that holds: over limit > auxiliary > aborted > constrained > images > unknown
    context > undelivered."""
    finished = call.finished
    if finished is not None and finished.over_limit:
        return Exclusion.OVER_LIMIT
    if call.opened.auxiliary and not include_auxiliary:
        return Exclusion.AUXILIARY_CALL
    if not continued and (finished is None or finished.finish_reason in _CUT_OFF):
        return Exclusion.ABORTED
    if call.opened.constrained:
        return Exclusion.CONSTRAINED
    if call.opened.images:
        return Exclusion.IMAGES
    if call.prompt is None:
        return Exclusion.UNKNOWN_CONTEXT
    if not continued and not call.delivered:
        return Exclusion.UNDELIVERED
    return None
