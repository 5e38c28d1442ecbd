"""The one module that imports Slime, or its relative. Where both are absent their types come from `standalone`.

Versions are told apart by what they have, never by a version number.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polar.endings import SlimeStatus


def _installed(package: str) -> bool:
    """Another package of the name `slime` is not Slime: it has no utils.types."""
    try:
        return find_spec(f"{package}.utils.types") is not None
    except ModuleNotFoundError:
        return False


_TRAINER = next(filter(_installed, ("slime", "miles")), None)
"""Slime, or the relative of it that is on PyPI (`miles-rl`)."""

if TYPE_CHECKING or _TRAINER is None:
    from slime_bridge.standalone import (
        RolloutDataSourceWithBuffer,
        RolloutFnEvalOutput,
        RolloutFnTrainOutput,
        Sample,
        read_file,
    )
else:
    RolloutFnEvalOutput = import_module(f"{_TRAINER}.rollout.base_types").RolloutFnEvalOutput
    RolloutFnTrainOutput = import_module(f"{_TRAINER}.rollout.base_types").RolloutFnTrainOutput
    RolloutDataSourceWithBuffer = import_module(f"{_TRAINER}.rollout.data_source").RolloutDataSourceWithBuffer
    read_file = import_module(f"{_TRAINER}.utils.data").read_file
    Sample = import_module(f"{_TRAINER}.utils.types").Sample

__all__ = [
    "GroupingError",
    "RolloutDataSourceWithBuffer",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "group_together",
    "grouping_field",
    "read_file",
    "slime_status",
    "trajectory_of",
    "wants_nucleus_ids",
]


class GroupingError(ValueError):
    """The loss could not count this trajectory once."""


def grouping_field(sample_type: type = Sample) -> str | None:
    """The field by which the loss counts a trajectory once; None: it counts samples (Slime before v0.3.0, miles)."""
    known: dict[str, Any] = getattr(sample_type, "__dataclass_fields__", {})
    return next((name for name in ("group_id", "rollout_id") if name in known), None)


def group_together(samples: Sequence[Any], trajectory: int | None) -> None:
    """Gives a trajectory's samples the one id that no other trajectory has. Raises GroupingError where it cannot."""
    if trajectory is None:
        raise GroupingError("the data source's sample has no index, by which its trajectory is told from the others")
    field = grouping_field(type(samples[0]))
    if field is None and len(samples) > 1:
        raise GroupingError(
            f"{len(samples)} traces of one session, and this trainer's Sample has neither group_id nor rollout_id, by "
            "which the loss would count them once; it can take agents whose sessions are one trace each"
        )
    if field is not None:
        for sample in samples:
            setattr(sample, field, trajectory)


def trajectory_of(sample: Any) -> Any:
    """The sample's grouping id, else its index."""
    grouped = getattr(sample, grouping_field(type(sample)) or "index")
    return sample.index if grouped is None else grouped


def slime_status(status: SlimeStatus) -> Any:
    return Sample.Status(status.value)  # type: ignore[attr-defined]


def wants_nucleus_ids() -> bool:
    """Whether this Slime needs each token's nucleus ids once top_p is not 1."""
    return "rollout_top_p_token_ids" in Sample.__dataclass_fields__
