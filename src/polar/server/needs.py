"""What a session asks of a node. Whole numbers, CPUs in thousandths, so that sums of reservations are exact."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from polar.records import Resources
from polar.requests import TaskRequest


class Amount(msgspec.Struct, frozen=True):
    millicpus: int = 0
    memory_mb: int = 0
    gpus: int = 0

    def __add__(self, other: Amount) -> Amount:
        return Amount(self.millicpus + other.millicpus, self.memory_mb + other.memory_mb, self.gpus + other.gpus)

    def __sub__(self, other: Amount) -> Amount:
        return Amount(self.millicpus - other.millicpus, self.memory_mb - other.memory_mb, self.gpus - other.gpus)

    def __bool__(self) -> bool:
        return self != NOTHING

    def __str__(self) -> str:
        """Such as: 2.5 CPUs, 4096 MiB of memory, 1 GPU."""
        parts = [
            f"{self.millicpus / 1000:g} CPU{'s' * (self.millicpus != 1000)}" if self.millicpus else "",
            f"{self.memory_mb} MiB of memory" if self.memory_mb else "",
            f"{self.gpus} GPU{'s' * (self.gpus != 1)}" if self.gpus else "",
        ]
        return ", ".join(filter(None, parts)) or "nothing"

    def within(self, room: Amount) -> bool:
        """What is not asked for needs no room."""
        return (
            (not self.millicpus or self.millicpus <= room.millicpus)
            and (not self.memory_mb or self.memory_mb <= room.memory_mb)
            and (not self.gpus or self.gpus <= room.gpus)
        )

    def share(self, room: Amount) -> float:
        """How much of what is asked `room` has, from 0 to 1: the scarcest decides."""
        pairs = ((self.millicpus, room.millicpus), (self.memory_mb, room.memory_mb), (self.gpus, room.gpus))
        return min((min(1.0, has / asked) for asked, has in pairs if asked), default=1.0)


NOTHING = Amount()


def most(amounts: Iterable[Amount]) -> Amount:
    """The largest of each kind of resource."""
    columns = zip(*((each.millicpus, each.memory_mb, each.gpus) for each in amounts), strict=True)
    return Amount(*map(max, columns))


class Needs(msgspec.Struct, frozen=True):
    """Of every session of a task; labels are sorted pairs."""

    amount: Amount = NOTHING
    labels: tuple[tuple[str, str], ...] = ()


def needs_of(request: TaskRequest) -> Needs:
    """The peak: the agent's sandbox, and beside it the evaluation's where that is a fresh one, which is brought up
    before the agent's is gone."""
    runtime, evaluator = request.runtime, request.evaluator
    amount = NOTHING
    if runtime is not None:
        amount = amount_of(runtime.cpus or 0.0, runtime.memory_mb or 0, runtime.gpus)
    if evaluator is not None and evaluator.refresh_runtime:
        amount = amount + amount
    return Needs(amount, tuple(sorted(request.node_labels.items())))


def amount_of(cpus: float, memory_mb: int, gpus: int) -> Amount:
    """To the nearest thousandth of a CPU; more than a billion CPUs are a billion."""
    return Amount(round(min(cpus, 1e9) * 1000), memory_mb, gpus)


def resources_of(amount: Amount) -> Resources:
    return Resources(cpus=amount.millicpus / 1000, memory_mb=amount.memory_mb, gpus=amount.gpus)
