"""The one module that imports Slime. Where Slime is absent its types come from `standalone`, field for field.

Versions are told apart by what they have, never by a version number.
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from polar.endings import SlimeStatus
from polar.errors import ConfigError


def _slime_here() -> bool:
    """Another package of the name `slime` is not Slime: it has no utils.types."""
    try:
        return find_spec("slime.utils.types") is not None
    except ModuleNotFoundError:
        return False


if TYPE_CHECKING or not _slime_here():
    from slime_bridge.standalone import (
        RolloutDataSourceWithBuffer,
        RolloutFnEvalOutput,
        RolloutFnTrainOutput,
        Sample,
        read_file,
    )
else:
    from slime.rollout.base_types import RolloutFnEvalOutput, RolloutFnTrainOutput
    from slime.rollout.data_source import RolloutDataSourceWithBuffer
    from slime.utils.data import read_file
    from slime.utils.types import Sample

__all__ = [
    "RolloutDataSourceWithBuffer",
    "RolloutFnEvalOutput",
    "RolloutFnTrainOutput",
    "Sample",
    "grouping_field",
    "read_file",
    "slime_status",
    "trajectory_of",
    "wants_nucleus_ids",
]


def grouping_field(sample_type: type = Sample) -> str:
    """The field by which the loss counts a trajectory once. Raises ConfigError where there is none."""
    known: dict[str, Any] = getattr(sample_type, "__dataclass_fields__", {})
    for name in ("group_id", "rollout_id"):
        if name in known:
            return name
    raise ConfigError("this Slime's Sample has neither group_id nor rollout_id: v0.3.0 or later is needed")


def trajectory_of(sample: Any) -> Any:
    """The sample's grouping id, else its index."""
    grouped = getattr(sample, grouping_field(type(sample)))
    return sample.index if grouped is None else grouped


def slime_status(status: SlimeStatus) -> Any:
    return Sample.Status(status.value)  # type: ignore[attr-defined]


def wants_nucleus_ids() -> bool:
    """Whether this Slime needs each token's nucleus ids once top_p is not 1."""
    return "rollout_top_p_token_ids" in Sample.__dataclass_fields__
