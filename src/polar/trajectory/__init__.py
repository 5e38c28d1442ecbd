"""Log to trajectory: pure functions that never lose, double or misplace a sampled token; each result is audited."""

from __future__ import annotations

from polar.errors import TaskFault
from polar.plugins import load
from polar.protocols import Builder
from polar.requests import StrategySpec

BUILDERS = {
    "prefix_merging": "polar.trajectory.prefix_merging:PrefixMerging",
    "per_request": "polar.trajectory.per_request:PerRequest",
}


def load_builder(spec: StrategySpec) -> Builder:
    """The builder that `spec.strategy` names, by table or as "module:Class". Raises TaskFault for an unknown one, and
    for settings of one that has none."""
    import_path = spec.strategy if ":" in spec.strategy else None
    if import_path is None and spec.strategy in BUILDERS and spec.config:
        raise TaskFault(f"builder.config: {spec.strategy} has no settings: leave out {', '.join(spec.config)}")
    builder: Builder = load("builder", BUILDERS, spec.strategy, import_path)(spec)
    return builder
