"""One model call, from the harness's question to a finished record: a task of its own, which clients only follow.

Opened precedes the engine; Finished stands in the log before the last byte can leave. An engine that aborts (new
weights) is continued from prompt + what was sampled, and nobody who follows notices.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import structlog

from polar.errors import EngineFault, HarnessFault, PolarError, ServerFault, TaskFault
from polar.protocols import AnswerReader, Delta, EngineCall, Piece
from polar.proxy.answering import check_tokens, logprobs_of, message_of, named_calls, remainder, thinking_tokens
from polar.proxy.canonical import Answer, Ask, Message, Opening, Refusal, number_too_large
from polar.proxy.conversation import Conversation, Place, Plan
from polar.proxy.forms import check_bias, check_length, grammar_of
from polar.proxy.sampling import effective, reshapes
from polar.proxy.transcript import Transcript
from polar.records import IDS
from polar.sessionlog import Body, Opened, StoredBody

if TYPE_CHECKING:
    from polar.proxy.session import Session

T = TypeVar("T")
log = structlog.get_logger("polar.proxy")
HEAVY_BYTES = 256 * 1024
"""work on a body above this goes to a thread"""
_LONG = 4096
"""characters; encoding more (some milliseconds) goes to a thread"""
_TRIES = 4
"""with a back-off of 1, 4 and 16 times the proxy's: an engine has some 20 s to come back"""
_ENDLESS_ABORTS = 50


async def aside(heavy: bool, function: Callable[..., T], *arguments: Any) -> T:
    """Calls it: in a thread if it is heavy, so that the loop goes on."""
    return await asyncio.to_thread(function, *arguments) if heavy else function(*arguments)


async def planned(conversation: Conversation, place: Place, ask: Ask) -> Plan:
    """The prompt that a call has, or would have. Raises TaskFault `template`."""
    new = ask.messages[place.expected_count :]
    plan: Plan | None = await aside(_long(new), conversation.continued, place, ask.messages, ask.tools)
    if plan is None:
        plan = await aside(_long(ask.messages), conversation.rendered, place, ask.messages, ask.tools)
    return plan


class Call:
    """`deltas` grow while it is sampled; then `answer` or `failure` is set, and it is `over`."""

    def __init__(self, session: Session, dialect: str, body: Body, ask: Ask) -> None:
        self.deltas: list[Delta] = []
        self.answer: Answer | None = None
        self.failure: Refusal | None = None
        self.followers = 0
        self.delivered = False
        self.auxiliary = ask.model in session.auxiliary_names
        self.opening = Opening(
            id="",
            model=ask.model,
            created=int(time.time()),
            usage_in_stream=ask.usage_in_stream,
            echo=ask.echo,
        )
        self._session = session
        self._dialect = dialect
        self._ask = ask
        self._body: Body | None = body
        self._stored: StoredBody | None = None
        self._transcript = Transcript(session.log, session.conversation)
        self._news = asyncio.Event()
        self._sampling: dict[str, Any] = {}
        self._grammar: dict[str, Any] | None = None
        self._plan: Plan | None = None
        self._prompt_ids: np.ndarray | None = None
        self._reader: AnswerReader | None = None

    @property
    def opened(self) -> bool:
        """Whether it is in the log; else it was refused before it reached the engine."""
        return bool(self.opening.id)

    @property
    def over(self) -> bool:
        return self.answer is not None or self.failure is not None

    async def news(self, seen: int, patience: float | None = None) -> list[Delta]:
        """Deltas behind the first `seen`; waits for some, for the end, or for `patience` seconds."""
        if len(self.deltas) == seen and not self.over:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._news.wait()
        return self.deltas[seen:]

    def asks(self, ask: Ask) -> bool:
        """Whether it is the same question to the model; not known of a call that is delivered or has failed."""
        return self._ask == ask

    def join(self) -> None:
        self._transcript.joined()

    def deliver(self) -> None:
        """The last byte was handed to a socket without error."""
        if not self.delivered and not self._session.closed:
            self._transcript.delivered()
            self.delivered = True
            self._ask.messages, self._ask.tools = [], None

    async def run(self) -> None:
        try:
            place, plan = await self._prepare()
            self._open(place, plan)
            last = await self._sample(place)
            self._finish(place, last)
        except Refusal as refusal:
            self._session.refuse(self._dialect, refusal)
            self._fail(refusal)
        except asyncio.CancelledError:
            self._transcript.cut("abort")
            raise
        except PolarError as fault:
            self._transcript.cut("error", fault)
            self._fail(self._session.blame(fault))
        except OverflowError as error:  # of what encodes JSON and msgpack, whoever has to write the number first
            self._transcript.cut("error", HarnessFault(str(error), name="engine_refused"))
            assert self._body is not None, "the task has not ended"
            where = number_too_large(json.loads(self._body.raw))
            too_large = Refusal("bad_request", f"{where}: the number is beyond 64 bits")
            self._session.refuse(self._dialect, too_large)
            self._fail(too_large)
        except Exception as error:  # a bug of ours ends this call by name; the other sessions of the proxy go on
            log.exception("a model call failed", session=self._session.attempt.session_id)
            bug = ServerFault(f"{type(error).__name__}: {error}")
            self._transcript.cut("error", bug)
            self._fail(self._session.blame(bug))

    def end(self) -> None:
        """Its task has ended: what only the task needed is let go, and followers of an unanswered call are told."""
        if not self.over:
            self._fail(Refusal("engine", "the call was cut off"))
        if self.answer is None:
            self._ask.messages, self._ask.tools = [], None
        self._body = self._stored = self._prompt_ids = self._reader = self._plan = None

    # Before the engine

    async def _prepare(self) -> tuple[Place, Plan | None]:
        conversation, ask = self._session.conversation, self._ask
        assert self._body is not None, "the task has not ended"
        check_bias(ask, self._session.rendering)
        self._grammar = grammar_of(ask, self._session.engine, self._session.rendering)
        heavy = len(self._body.raw) > HEAVY_BYTES
        size, context = len(self._body.raw), self._session.context_length
        await aside(heavy, check_length, ask, size, self._session.rendering, context)
        place = await aside(heavy, conversation.place, ask.messages, ask.tools)
        self._stored = await aside(heavy, self._session.bodies.stored, self._body, place.base)
        if not self._session.engine.takes_ids:
            return place, None
        try:
            self._plan = plan = await planned(conversation, place, ask)
        except TaskFault as fault:
            raise Refusal("bad_request", fault.message) from fault
        length, context = len(plan.ids), self._session.context_length
        if context is not None and length >= context:
            raise Refusal("context", f"prompt is too long: {length} tokens > {context} maximum context length")
        return place, plan

    def _open(self, place: Place, plan: Plan | None) -> None:
        session, ask = self._session, self._ask
        attempt, rendering, number = session.attempt, session.rendering, session.log.calls + 1
        self._sampling = effective(
            ask.sampling,
            session.forced,
            names=(attempt.session_index, attempt.attempt, number),
            room=session.room(None if plan is None else len(plan.ids)),
            stop_ids=rendering.stop_ids if rendering is not None else (),
        )
        tools_from = session.conversation.tools_from(place)
        assert self._stored is not None, "it is prepared"
        opened = Opened(
            call=number,
            at=time.time(),
            dialect=self._dialect,
            **self._stored.fields,
            model=ask.model,
            stream=ask.stream,
            auxiliary=self.auxiliary,
            sampling=self._sampling,
            images=ask.images,
            constrained=bool(ask.forced) or ask.json_schema is not None or reshapes(self._sampling),
            messages_base=place.base,
            messages_keep=place.keep,
            messages=ask.messages[place.keep :],
            tools_from=tools_from,
            tools=ask.tools if tools_from is None else None,
        )
        self._transcript.opened(opened, place, plan)
        session.bodies.remember(number, self._stored)
        name = f"{attempt.session_id}:{attempt.attempt}:{number}".encode()
        self.opening.id = self.opening.id or hashlib.blake2b(name, digest_size=12).hexdigest()
        if plan is not None:
            self._stands(plan)
        if rendering is not None and session.engine.takes_ids and ask.stream:
            self._reader = rendering.reader(ask.offered, self._sampling.get("stop") or [])

    def _stands(self, plan: Plan) -> None:
        self._prompt_ids = plan.ids
        self.opening.prompt_tokens = len(plan.ids)

    # The engine

    async def _sample(self, place: Place) -> Piece:
        faults = aborts = 0
        while True:
            before = self._transcript.count
            try:
                last = await self._session.gate.run(self._ask_engine(place))
            except EngineFault as fault:
                faults += 1
                if faults == _TRIES or not self._may_ask_again(fault):
                    raise
                await asyncio.sleep(self._session.backoff * 4 ** (faults - 1))
                self._begin_again(place)
                continue
            finally:
                self._transcript.flush()
            if last is not None and last.finish_reason != "abort":
                return last
            count = self._transcript.count
            aborts = aborts + 1 if count == before or not self._continuable else 0
            if aborts == _ENDLESS_ABORTS or (self.deltas and not self._continuable):
                raise EngineFault("the engine aborted the call, and it cannot be continued", name="engine_aborted")
            if count >= self._sampling["max_tokens"]:
                return Piece(ids=np.empty(0, IDS), finish_reason="length")
            self._begin_again(place)
            # An engine that is about to take new weights aborts again at once.
            await asyncio.sleep(min(0.02 * 2**aborts, 1.0) if aborts else 0)

    def _may_ask_again(self, fault: EngineFault) -> bool:
        if fault.name in ("engine_timeout", "engine_lies"):
            return False
        return not self.deltas

    @property
    def _continuable(self) -> bool:
        """A grammar would start anew behind what was sampled."""
        return self._session.engine.takes_ids and self._grammar is None

    def _begin_again(self, place: Place) -> None:
        """What was sampled and cannot be continued stays in the log as a call that was cut off; another takes over."""
        if self._transcript.count and not self._continuable:
            self._transcript.cut("abort")
            self._transcript = Transcript(self._session.log, self._session.conversation)
            self._open(place, self._plan)

    async def _ask_engine(self, place: Place) -> Piece:
        last: Piece | None = None
        async with aclosing(self._session.engine.generate(self._engine_call())) as pieces:  # type: ignore[type-var]
            async for last in pieces:
                self._take(place, last)
        if last is None or last.finish_reason is None:
            raise EngineFault("the engine's answer has no end", name="engine_error")
        return last

    def _engine_call(self) -> EngineCall:
        engine, ask = self._session.engine, self._ask
        sampling = self._sampling | {"max_tokens": self._sampling["max_tokens"] - self._transcript.count}
        call = EngineCall(rid=self._session.request_id(), stream=ask.stream, sampling=sampling, grammar=self._grammar)
        if engine.takes_ids:
            assert self._prompt_ids is not None
            call.prompt_ids = np.concatenate([self._prompt_ids, self._transcript.ids])
        else:
            call.messages, call.tools, call.tool_choice = ask.messages, ask.tools, ask.tool_choice
            call.json_schema, call.parallel_calls = ask.json_schema, ask.parallel_calls
        return call

    def _take(self, place: Place, piece: Piece) -> None:
        if piece.prompt_ids is not None and not self._transcript.has_prompt:
            plan = Plan(ids=piece.prompt_ids, source="engine")
            self._transcript.prompt(place, plan)
            self._stands(plan)
        check_tokens(piece, self._session.rendering)
        self._transcript.take(piece)
        self._session.record.sampled += len(piece.ids)
        if self._reader is not None:
            self._relay(self._reader.feed(piece.ids))
        elif self._ask.stream and not self._session.engine.takes_ids:
            parts = (Delta(kind="reasoning", text=piece.reasoning), Delta(kind="text", text=piece.text))
            self._relay([delta for delta in parts if delta.text])

    def _relay(self, deltas: list[Delta]) -> None:
        if deltas:
            self.deltas += deltas
            self._notify()

    # After the engine

    def _finish(self, place: Place, last: Piece) -> None:
        session, count = self._session, self._transcript.count
        message = self._message(last)
        cut = last.finish_reason == "length"
        reason = "length" if cut else "tool_calls" if "tool_calls" in message else "stop"
        over = session.over_limit(count)
        rendering, ids = session.rendering, self._transcript.ids
        told = self._transcript.logprobs if self._ask.logprobs else []
        self._transcript.finished(place, message, last, reason=reason, text=self._text(), over=over)
        self._relay(remainder(message, self.deltas))
        self.opening.prompt_tokens = last.usage.get("prompt_tokens", self.opening.prompt_tokens)
        self.answer = Answer(
            opening=self.opening,
            message=message,
            finish_reason=reason,
            matched=last.matched if isinstance(last.matched, str) else None,
            completion_tokens=last.usage.get("completion_tokens", count),
            reasoning_tokens=thinking_tokens(message, last, rendering, ids),
            logprobs=logprobs_of(rendering, ids, told) if self._ask.logprobs and rendering is not None else None,
        )
        session.completed(self, self.answer)
        self._notify()

    def _message(self, last: Piece) -> Message:
        offered, stops = self._ask.offered, self._sampling.get("stop") or []
        message = message_of(last, self._session.rendering, self._transcript.ids, offered, stops, self.deltas)
        return named_calls(message, self.opening.id)

    def _text(self) -> str:
        rendering = self._session.rendering
        return rendering.decode(self._transcript.ids) if rendering is not None else ""

    def _fail(self, failure: Refusal) -> None:
        self.failure = failure
        self._notify()

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def _long(messages: list[Message]) -> bool:
    return sum(len(message["content"]) for message in messages) > _LONG
