"""A scripted proxy, as far as a log shows it: writes records with the real writer and reads them back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard

from polar.records import IDS, LOGPROBS
from polar.sessionlog import (
    Chunk,
    Delivered,
    Finished,
    Header,
    Joined,
    LogWriter,
    Opened,
    Prompt,
    SessionLog,
    read,
)

Message = dict[str, Any]


def header(session_id: str = "s1") -> Header:
    return Header(session_id=session_id, task_id="t1", attempt=1, model="policy", created_at=0.0)


def common(a: Sequence[Any], b: Sequence[Any]) -> int:
    """Length of the common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


class ScriptedLog:
    """One call a line. Every call's whole prompt is given; base and keep are derived as a proxy would."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "session.log"
        self._writer = LogWriter(self.path, header())
        self._sequences: dict[int, list[int]] = {}
        self._messages: dict[int, list[Message]] = {}

    def call(
        self,
        prompt: Sequence[int],
        sampled: Sequence[int],
        *,
        after: int | None = None,
        like: int | None = None,
        logprobs: Sequence[float | None] | str | None = "some",
        version: str | None = "1",
        finish: str | None = "stop",
        delivered: bool = True,
        source: str = "rendered",
        auxiliary: bool = False,
        over_limit: bool = False,
        joined: int = 0,
        message: Message | None = None,
    ) -> int:
        """`after`: the call whose answer the messages continue; `like`: one that they only begin like. `finish` None:
        the call never finished."""
        number = self._writer.calls + 1
        self._open(number, after, auxiliary)
        self._prompt(number, list(prompt), after, like, source)
        values = [-0.5 - 0.25 * i for i in range(len(sampled))] if logprobs == "some" else logprobs
        array = None if values is None else np.asarray(values, LOGPROBS)
        self._writer.append(Chunk(call=number, ids=np.asarray(sampled, IDS), logprobs=array, version=version))
        self._sequences[number] = [*prompt, *sampled]
        if finish is not None:
            answer = message or {"role": "assistant", "content": f"answer {number}"}
            self._messages[number].append(answer)
            self._writer.append(
                Finished(call=number, at=2.0, finish_reason=finish, message=answer, over_limit=over_limit)
            )
        for _ in range(joined):
            self._writer.append(Joined(call=number, at=2.5))
        if delivered:
            self._writer.append(Delivered(call=number, at=3.0))
        return number

    def read(self) -> SessionLog:
        return read(self.path)

    def _open(self, number: int, after: int | None, auxiliary: bool) -> None:
        known = self._messages[after] if after is not None else []
        new = [{"role": "user" if after is None else "tool", "content": f"for call {number}"}]
        self._messages[number] = known + new
        self._writer.append(
            Opened(
                call=number,
                at=1.0,
                dialect="openai_chat",
                body=zstandard.compress(b"{}"),
                model="policy",
                auxiliary=auxiliary,
                messages_base=after,
                messages_keep=len(known),
                messages=new,
            )
        )

    def _prompt(self, number: int, prompt: list[int], after: int | None, like: int | None, source: str) -> None:
        base = like if after is None else after
        keep = common(prompt, self._sequences[base]) if base is not None else 0
        ids = np.asarray(prompt[keep:], IDS)
        record = Prompt(call=number, base=base, keep=keep, ids=ids, source=source, expected=after)  # type: ignore[arg-type]
        self._writer.append(record)
