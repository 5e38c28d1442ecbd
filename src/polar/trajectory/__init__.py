"""Log to trajectory: pure functions that never lose, double or misplace a sampled token; each result is audited."""

from __future__ import annotations

from polar.endings import Ending
from polar.errors import BuildFault, WrongFields
from polar.plugins import blamed_on, load
from polar.protocols import Builder
from polar.records import BuildResult
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog

BUILDERS = {
    "prefix_merging": "polar.trajectory.prefix_merging:PrefixMerging",
    "per_request": "polar.trajectory.per_request:PerRequest",
}


def load_builder(spec: StrategySpec) -> Builder:
    """The builder that `spec.strategy` names, by table or as "module:Class". Raises TaskFault for an unknown one, and
    for settings of one that has none."""
    import_path = spec.strategy if ":" in spec.strategy else None
    if import_path is None and spec.strategy in BUILDERS and spec.config:
        words = f"{spec.strategy} has no settings: leave out {', '.join(spec.config)}"
        raise WrongFields([(("builder", "config"), words)])
    builder: Builder = load("builder", BUILDERS, spec.strategy, import_path)(spec)
    return builder


def build(builder: Builder, log: SessionLog, ending: Ending, *, include_auxiliary: bool) -> BuildResult:
    """What is handed out of an attempt whose run had this ending: the same bytes whenever and wherever it is built.
    Raises BuildFault, also for whatever else the builder raises."""
    with blamed_on(BuildFault, "the builder"):
        built = builder.build(log, include_auxiliary=include_auxiliary)
    if not built.tokens.balanced:  # the builders here audit more than that themselves
        raise BuildFault(f"the builder's ledger does not balance: {built.tokens}")
    if ending.forced_finish and built.traces:
        built.traces[-1].finish_reason = ending.forced_finish
    return built
