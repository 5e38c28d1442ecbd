"""What is to be looked at when its time has come, without looking at everything else."""

from __future__ import annotations

import heapq
from itertools import count
from typing import Generic, TypeVar

T = TypeVar("T")


class Alarms(Generic[T]):
    """An alarm is never taken back: whoever hears it checks whether it still holds, and may set it anew."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = count()

    def set(self, when: float, what: T) -> None:
        heapq.heappush(self._heap, (when, next(self._numbers), what))

    def due(self, now: float) -> list[T]:
        due = []
        while self._heap and self._heap[0][0] <= now:
            due.append(heapq.heappop(self._heap)[2])
        return due
