"""Typed reads of the trainer's args. Everything that is wrong is collected, each with its key and what it may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


class Keys:
    """What is wrong is read as the default and added to `wrong`; who has read everything looks there."""

    def __init__(self, args: Any) -> None:
        self.wrong: list[str] = []
        self._args = args

    def _get(self, key: str) -> Any:
        return getattr(self._args, key, None)

    def _refuse(self, key: str, why: str) -> None:
        told = f"{key}: {why}"
        if told not in self.wrong:
            self.wrong.append(told)

    def missing(self, key: str, what: str) -> None:
        """Unless its value has been refused already."""
        if self._get(key) in (None, ""):
            self.wrong.append(f"{key} is missing: {what}")

    def mapping(self, key: str, what: str) -> dict[str, Any]:
        value = self._get(key)
        if not isinstance(value, Mapping):
            self.wrong.append(f"{key} is missing or no mapping: {what}")
            return {}
        return dict(value)

    def optional_text(self, key: str) -> str | None:
        value = self._get(key)
        if value is None or value == "":
            return None
        if not isinstance(value, str):
            self._refuse(key, f"{value!r} is no text: put it in quotes")
            return None
        return value

    def text(self, key: str, default: str) -> str:
        return self.optional_text(key) or default

    def choice(self, key: str, allowed: tuple[str, ...]) -> str:
        value = self.text(key, allowed[0])
        if value not in allowed:
            self._refuse(key, f"{value!r} is not one of {', '.join(allowed)}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._get(key)
        if value is not None and not isinstance(value, bool):
            self._refuse(key, f"{value!r} is neither true nor false")
        return value if isinstance(value, bool) else default

    def optional_count(self, key: str) -> int | None:
        value = self._get(key)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            self._refuse(key, f"{value!r} is no whole number above 0")
            return None
        return value

    def count(self, key: str, default: int | None) -> int:
        value = self.optional_count(key)
        if value is None and default is None:
            self.missing(key, "a whole number above 0")
        return value or default or 1

    def seconds(self, key: str, default: float | None) -> float | None:
        value = self._number(key)
        if value is not None and value <= 0:
            self._refuse(key, f"{value} is not above 0: give seconds, or leave it out for the default")
        return default if value is None else value

    def fraction(self, key: str, default: float) -> float:
        value = self._number(key)
        if value is not None and not 0 <= value <= 1:
            self._refuse(key, f"{value} is not between 0 and 1")
        return default if value is None else value

    def _number(self, key: str) -> float | None:
        value = self._get(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            self._refuse(key, f"{value!r} is no finite number: write it without quotes, e.g. 0.5")
            return None
        return value
