"""The bridge's conservation law: arrived = waiting + trained + Σ dropped[reason], in trainable tokens and in groups."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Account:
    """`waiting`: accepted, and not yet handed to the trainer."""

    arrived: int = 0
    trained: int = 0
    waiting: int = 0
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def balanced(self) -> bool:
        return self.arrived == self.waiting + self.trained + sum(self.dropped.values())


@dataclass
class Ledger:
    tokens: Account = field(default_factory=Account)
    groups: Account = field(default_factory=Account)

    def dropped(self, reason: str, tokens: int) -> None:
        """A group arrived and was dropped at once."""
        self.groups.arrived += 1
        self.groups.dropped[reason] += 1
        self.tokens.arrived += tokens
        self.tokens.dropped[reason] += tokens

    def accepted(self, arrived: int, trained: int, unused: Counter[str]) -> None:
        """A group arrived; of its `arrived` tokens `trained` wait for the trainer."""
        self.groups.arrived += 1
        self.groups.waiting += 1
        self.tokens.arrived += arrived
        self.tokens.waiting += trained
        self.tokens.dropped.update(unused)

    def expired(self, reason: str, tokens: int) -> None:
        """A waiting group was dropped."""
        self.groups.waiting -= 1
        self.groups.dropped[reason] += 1
        self.tokens.waiting -= tokens
        self.tokens.dropped[reason] += tokens

    def handed_over(self, tokens: int) -> None:
        """A waiting group went to the trainer."""
        self.groups.waiting -= 1
        self.groups.trained += 1
        self.tokens.waiting -= tokens
        self.tokens.trained += tokens

    @property
    def balanced(self) -> bool:
        return self.tokens.balanced and self.groups.balanced
