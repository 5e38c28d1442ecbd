"""Log to trajectory: pure functions that never lose, double or misplace a sampled token; each result is audited."""

from __future__ import annotations

from polar.plugins import load
from polar.protocols import Builder
from polar.requests import StrategySpec

BUILDERS = {
    "prefix_merging": "polar.trajectory.prefix_merging:PrefixMerging",
    "per_request": "polar.trajectory.per_request:PerRequest",
}


def load_builder(spec: StrategySpec) -> Builder:
    """The builder that `spec.strategy` names, by table or as "module:Class". Raises TaskFault for an unknown one."""
    import_path = spec.strategy if ":" in spec.strategy else None
    builder: Builder = load("builder", BUILDERS, spec.strategy, import_path)(spec)
    return builder
