"""A group's age: the consuming rollout minus the one in which the policy of its oldest trainable token began."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Age(NamedTuple):
    rollouts: int
    unknown: int
    """versions that no entry had seen, or none told at all: the submit stamp stood in for them"""


class PolicyVersions:
    """Remembers the rollout at whose entry a version was first the engine's."""

    def __init__(self) -> None:
        self._first: dict[str, int] = {}

    def seen(self, version: str, rollout_id: int) -> None:
        self._first.setdefault(version, rollout_id)

    @property
    def only(self) -> tuple[str, int] | None:
        """The version that the engine has always had, and since which rollout; None once it has had two."""
        return next(iter(self._first.items())) if len(self._first) == 1 else None

    def age(self, versions: Iterable[str], *, submitted: int, consuming: int) -> Age:
        """`versions`: of the group's trainable tokens; `submitted`: the rollout current at its submission."""
        found = [self._first.get(version) for version in versions]
        known = [rollout for rollout in found if rollout is not None]
        unknown = len(found) - len(known) if found else 1
        oldest = min([*known, submitted] if unknown else known)
        return Age(max(0, consuming - oldest), unknown)
