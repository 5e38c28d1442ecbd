"""Every prompt and sequence of a session in one radix tree of token ids.

So the ids themselves decide what a prompt keeps of which call, whatever the log names as its base; and the cost is
linear in the ids that the log holds: no prompt is put together to be compared.
"""

from __future__ import annotations

from collections.abc import Container

import numpy as np

from polar.errors import BuildFault
from polar.records import IDS
from polar.sessionlog import Call, Prompt, SessionLog


class _Node:
    """`ids` lead here from the parent; `depth` ids lead here from the root; `ended` are calls with an answer whose
    sequence ends here."""

    __slots__ = ("children", "depth", "ended", "ids", "parent")

    def __init__(self, ids: np.ndarray, parent: _Node | None) -> None:
        self.ids = ids
        self.parent = parent
        self.depth: int = len(ids) + (parent.depth if parent else 0)
        self.children: dict[int, _Node] = {}
        self.ended: list[int] = []


class Sequences:
    """Positions of the calls whose prompt is known. Raises BuildFault when a prompt stands on what is not there."""

    def __init__(self, log: SessionLog) -> None:
        self._log = log
        self._root = _Node(np.empty(0, IDS), None)
        self._prompts: dict[int, _Node] = {}
        self._ends: dict[int, _Node] = {}
        for call in log.calls:
            if call.prompt is not None:
                self._add(call, call.prompt)

    def knows(self, number: int) -> bool:
        return number in self._ends

    def continued_by(self, call: Call, among: Container[int] | None = None) -> int | None:
        """The earlier call with sampled ids that `call` continues: its prompt keeps that call's whole sequence.

        The longest one; of several that end at the same id, the one that the log expects, then the prompt's base, then
        a delivered one, then the latest. `among` restricts which calls are meant.
        """
        node = self._prompts.get(call.number)
        while node is not None:
            earlier = [n for n in node.ended if n < call.number and (among is None or n in among)]
            if earlier:
                return max(earlier, key=lambda number: self._likeness(call, number))
            node = node.parent
        return None

    def kept(self, call: Call, other: int) -> int:
        """How many leading ids of call `other`'s sequence the prompt of `call` keeps."""
        a, b = self._prompts[call.number], self._ends[other]
        while a is not b:
            if a.depth < b.depth:
                a, b = b, a
            assert a.parent is not None, "two nodes of one depth differ only below the root"
            a = a.parent
        return a.depth

    def prompt(self, call: Call, start: int = 0) -> np.ndarray:
        """Ids of the call's prompt from position `start`; linear in what is asked for."""
        return _path(self._prompts[call.number], start)

    def sequence(self, number: int, start: int = 0) -> np.ndarray:
        """Prompt and sampled ids of a call from position `start`; linear in what is asked for."""
        return _path(self._ends[number], start)

    def _likeness(self, call: Call, number: int) -> tuple[bool, bool, bool, int]:
        prompt = call.prompt
        assert prompt is not None, "a call without a prompt has no position"
        return number == prompt.expected, number == prompt.base, self._log.call(number).delivered, number

    def _add(self, call: Call, prompt: Prompt) -> None:
        at = self._descend(self._base(call, prompt), prompt.ids)
        end = self._descend(at, call.ids)
        if len(call.ids):
            end.ended.append(call.number)
        self._prompts[call.number], self._ends[call.number] = at, end

    def _base(self, call: Call, prompt: Prompt) -> _Node:
        node = self._root if prompt.base is None else self._ends.get(prompt.base)
        if node is None or not 0 <= prompt.keep <= node.depth:
            where = f"{prompt.keep} ids of call {prompt.base}"
            raise BuildFault(f"session {self._log.header.session_id}: call {call.number} keeps {where}: not in the log")
        while node.parent is not None and node.parent.depth >= prompt.keep:
            node = node.parent
        return _split(node, prompt.keep) if node.depth > prompt.keep else node

    def _descend(self, node: _Node, ids: np.ndarray) -> _Node:
        while len(ids):
            child = node.children.get(int(ids[0]))
            if child is None:
                node.children[int(ids[0])] = child = _Node(ids, node)
                return child
            common = _common(child.ids, ids)
            node = child if common == len(child.ids) else _split(child, node.depth + common)
            ids = ids[common:]
        return node


def _split(node: _Node, depth: int) -> _Node:
    """A new node at `depth` on the way to `node`, which stays what it is."""
    parent = node.parent
    assert parent is not None, "the root has no way to it"
    cut = depth - parent.depth
    upper = _Node(node.ids[:cut], parent)
    parent.children[int(upper.ids[0])] = upper
    node.ids, node.parent = node.ids[cut:], upper
    upper.children[int(node.ids[0])] = node
    return upper


def _common(a: np.ndarray, b: np.ndarray) -> int:
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    first = int(differs.argmax()) if length else 0
    return first if length and differs[first] else length


def _path(node: _Node, start: int) -> np.ndarray:
    parts = [np.empty(0, IDS)]
    at: _Node | None = node
    while at is not None and at.depth > start:
        parts.append(at.ids[max(0, start - at.depth + len(at.ids)) :])
        at = at.parent
    return np.concatenate(parts[::-1])
