"""What Slime wrote for TensorBoard."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def logged(folder: str) -> dict[str, list[tuple[int, float]]]:
    """(step, value) in the order of the log's files, by tag."""
    found: dict[str, list[tuple[int, float]]] = {}
    for file in sorted(Path(folder).rglob("events*")):
        events = EventAccumulator(str(file), {"scalars": 0}).Reload()
        for tag in events.Tags()["scalars"]:
            found.setdefault(tag, []).extend((each.step, each.value) for each in events.Scalars(tag))
    return found
