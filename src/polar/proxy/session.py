"""One attempt's use of the model: its limits, its retries recognised, its calls ended with it.

A call is a repeat if its header says so, or if an equal call is undelivered and its client has gone: it joins that call
or has its answer replayed. An equal call beside a live one, or after a delivered one, is a new sample (case 23). Equal
are the same bytes, and the same question to the model: clients write other notes of their own into a second try.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from polar.config import PriceSettings
from polar.errors import PolarError, ServerFault, TaskFault
from polar.protocols import Engine, Rendering
from polar.proxy.call import Call
from polar.proxy.canonical import Answer, Ask, Refusal
from polar.proxy.conversation import Conversation
from polar.proxy.gate import Gate
from polar.requests import TaskRequest
from polar.sessionlog import Bodies, Body, LogWriter, Refused

_REMEMBERED = 16
"""calls whose answers can be replayed"""
_CUT_OFF = "engine_aborted"
"""new weights cut an answer off that had been relayed: a fault only if the harness does not go on after it"""
_REASONS = {"limit": "limit", "busy": "limit", "context": "context", "unsupported": "unsupported"}


class Attempt(msgspec.Struct, kw_only=True):
    """An attempt that may call the model under `key`; what it does goes to `log`, which stays its owner's to seal."""

    session_id: str
    task_id: str
    attempt: int
    session_index: int
    key: str
    task: TaskRequest
    log: LogWriter


class RunRecord(msgspec.Struct, kw_only=True):
    """How an attempt used the model. `calls`: those that reached the engine, `completions`: those it answered,
    auxiliary ones included. `limit`: the first limit that refused or cut a call. `fault`: an engine or server fault
    that no retry of the proxy healed. `refusal`: what the last refused call was told."""

    calls: int = 0
    completions: int = 0
    sampled: int = 0
    limit: str | None = None
    context: bool = False
    fault: str | None = None
    fault_message: str | None = None
    refused: int = 0
    refusal: str | None = None


class Shared(msgspec.Struct, kw_only=True):
    """What all sessions of a proxy have in common."""

    engine: Engine
    rendering: Rendering | None
    gate: Gate
    model: str
    context_length: int | None
    prices: PriceSettings | None
    grace_seconds: float
    backoff_seconds: float


class Session:
    def __init__(self, attempt: Attempt, shared: Shared) -> None:
        if attempt.task.limits.cost is not None and shared.prices is None:
            raise TaskFault("limits.cost cannot be kept: this gateway has no `prices` in its topology")
        self.attempt = attempt
        self.record = RunRecord()
        self.log = attempt.log
        self.engine, self.rendering = shared.engine, shared.rendering
        self.gate, self.context_length = shared.gate, shared.context_length
        self.backoff = shared.backoff_seconds
        self.conversation = Conversation(shared.rendering, attempt.task.reasoning)
        self.bodies = Bodies()
        self.forced = attempt.task.sampling.model_dump(exclude_none=True)
        self.auxiliary_names = {f"{name}-aux" for name in (shared.model, attempt.task.agent.model_name)}
        self.closed = False
        self._ending = False
        self._shared = shared
        self._tasks: dict[Call, asyncio.Task[None]] = {}
        self._recent: list[tuple[tuple[str, int], Call]] = []
        self._timers: dict[Call, asyncio.TimerHandle] = {}
        self._turns = 0
        self._cost = 0.0
        self._started = time.monotonic() - shared.gate.paused_seconds

    def call(self, dialect: str, body: Body, ask: Ask, *, repeat: bool) -> Call:
        """The call that answers this request: an earlier one that it repeats, or a new one. Raises Refusal."""
        if self._ending:
            raise Refusal("unauthorized", "this session has ended")
        key = dialect, body.digest
        earlier = self._repeated(key, ask, repeat)
        if earlier is not None:
            earlier.join()
            return earlier
        call = Call(self, dialect, body, ask)
        self._check_limits(call)
        self._turns += not call.auxiliary
        self._recent = [*self._recent[1 - _REMEMBERED :], (key, call)]
        task = asyncio.create_task(call.run())
        self._tasks[call] = task
        task.add_done_callback(lambda _: self._ended(call))
        return call

    @contextmanager
    def following(self, call: Call) -> Iterator[None]:
        """While this is entered somebody waits for the call; when nobody does any more, it lives for the grace."""
        if timer := self._timers.pop(call, None):
            timer.cancel()
        call.followers += 1
        try:
            yield
        finally:
            call.followers -= 1
            task = self._tasks.get(call)
            if not call.followers and task is not None:
                loop = asyncio.get_running_loop()
                self._timers[call] = loop.call_later(self._shared.grace_seconds, self._give_up, call, task)

    def refuse(self, dialect: str, refusal: Refusal) -> None:
        """Records a request that made no engine call."""
        self.record.refused += 1
        self.record.refusal = refusal.message
        self.record.context |= refusal.kind == "context"
        reason = _REASONS.get(refusal.kind, "bad_request")
        if not self.closed:
            with suppress(ServerFault):
                self.log.append(Refused(at=time.time(), dialect=dialect, reason=reason, detail=refusal.message))

    def blame(self, fault: PolarError) -> Refusal:
        """Notes what ended a call, and says it to the harness."""
        if fault.name == "context":
            self.record.context = True
            # The words by which Claude Code knows that it has to make room.
            return Refusal("context", f"prompt is too long: {fault.message}")
        if fault.name == "engine_refused":
            return Refusal("bad_request", fault.message)
        if self.record.fault is None:
            self.record.fault, self.record.fault_message = fault.name, fault.message
        return Refusal("engine" if fault.blame == "engine" else "server", fault.message)

    def room(self, prompt_length: int | None) -> int | None:
        """Tokens that the context and the token limit leave for an answer."""
        bounds = []
        if self.context_length is not None and prompt_length is not None:
            bounds.append(self.context_length - prompt_length)
        if (limit := self.attempt.task.limits.tokens) is not None:
            bounds.append(max(1, limit - self.record.sampled))
        return min(bounds, default=None)

    def over_limit(self, own: int) -> bool:
        """Whether the other calls alone had used the token limit up."""
        limit = self.attempt.task.limits.tokens
        return limit is not None and self.record.sampled - own >= limit

    def completed(self, call: Call, answer: Answer) -> None:
        self.record.completions += 1
        if not call.auxiliary:
            self.record.context = False  # the harness shortened its history and went on
            if self.record.fault == _CUT_OFF:
                self.record.fault = self.record.fault_message = None
        limit = self.attempt.task.limits.tokens
        if limit is not None and self.record.sampled >= limit and answer.finish_reason == "length":
            self.record.limit = self.record.limit or "tokens"
        if (prices := self._shared.prices) is not None:
            prompt, answered = answer.opening.prompt_tokens, answer.completion_tokens
            self._cost += (prices.input * prompt + prices.output * answered) / 1e6

    def request_id(self) -> str:
        return uuid.uuid4().hex

    async def close(self) -> RunRecord:
        """When it returns, every call has its end in the log and nothing of the session is in flight."""
        self._ending = True
        for timer in self._timers.values():
            timer.cancel()
        tasks: list[asyncio.Task[Any]] = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self.closed = True
        self.record.calls = self.log.calls
        return self.record

    def _ended(self, call: Call) -> None:
        self._tasks.pop(call, None)
        self._turns -= not call.opened and not call.auxiliary
        if timer := self._timers.pop(call, None):
            timer.cancel()
        call.end()

    def _give_up(self, call: Call, task: asyncio.Task[None]) -> None:
        """Nobody came back for it: from now on an equal call is a new one."""
        self._recent = [(key, kept) for key, kept in self._recent if kept is not call]
        task.cancel()

    def _repeated(self, key: tuple[str, int], ask: Ask, says_so: bool) -> Call | None:
        recent = [(at, call) for at, call in reversed(self._recent) if call.failure is None]
        equal = [call for at, call in recent if at == key or call.asks(ask)]
        left = [call for call in equal if not call.delivered and not call.followers]
        return next(iter(left or (equal if says_so else [])), None)

    def _check_limits(self, call: Call) -> None:
        if self.record.fault not in (None, _CUT_OFF):
            raise Refusal("engine", f"this session has met a fault and ends: {self.record.fault_message}")
        limits = self.attempt.task.limits
        if limits.concurrent_calls is not None and len(self._tasks) >= limits.concurrent_calls:
            raise Refusal("busy", f"limit of the session: {limits.concurrent_calls} calls at once")
        seconds = time.monotonic() - self.gate.paused_seconds - self._started
        used = {"turns": self._turns, "tokens": self.record.sampled, "seconds": seconds, "cost": self._cost}
        for name, value in used.items():
            limit = getattr(limits, name)
            if limit is not None and value >= limit and not (name == "turns" and call.auxiliary):
                self.record.limit = self.record.limit or name
                raise Refusal("limit", f"limit of the session reached: {limit:g} {name}")
