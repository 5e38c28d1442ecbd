"""One model call, from the harness's question to a finished record: a task of its own, which clients only follow.

Opened precedes the engine; Finished stands in the log before the last byte can leave. An engine that aborts (new
weights) is continued from prompt + what was sampled, and nobody who follows notices.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import structlog
import zstandard

from polar.errors import EngineFault, PolarError, ServerFault, TaskFault
from polar.protocols import AnswerReader, Delta, EngineCall, Piece
from polar.proxy.canonical import Answer, Ask, Message, Opening, Refusal
from polar.proxy.conversation import Place, Plan
from polar.proxy.sampling import effective
from polar.records import IDS, LOGPROBS
from polar.sessionlog import Chunk, Delivered, Finished, Joined, Opened

if TYPE_CHECKING:
    from polar.proxy.session import Session

log = structlog.get_logger("polar.proxy")
HEAVY_BYTES = 256 * 1024
"""work on a body above this goes to a thread"""
_TRIES = 3
_ENDLESS_ABORTS = 50


class Call:
    """`deltas` grow while it is sampled; then `answer` or `failure` is set, and it is `over`."""

    def __init__(self, session: Session, dialect: str, raw: bytes, ask: Ask) -> None:
        self.ask = ask
        self.dialect = dialect
        self.deltas: list[Delta] = []
        self.answer: Answer | None = None
        self.failure: Refusal | None = None
        self.followers = 0
        self.delivered = False
        self.number: int | None = None
        self.opening = Opening(id="", model=ask.model, created=int(time.time()), usage_in_stream=ask.usage_in_stream)
        self._session = session
        self._raw = raw
        self._joins = 0
        self._news = asyncio.Event()
        self._sampling: dict[str, Any] = {}
        self._prompt_ids: np.ndarray | None = None
        self._ids: list[np.ndarray] = []
        self._count = 0
        self._chunk: list[Piece] = []
        self._first_token_at: float | None = None
        self._reader: AnswerReader | None = None
        self._relayed = ""

    @property
    def over(self) -> bool:
        return self.answer is not None or self.failure is not None

    @property
    def auxiliary(self) -> bool:
        return self.ask.model in self._session.auxiliary_names

    @property
    def sampled(self) -> int:
        return self._count

    async def news(self, seen: int, patience: float) -> list[Delta]:
        """Deltas behind the first `seen`; waits for some, for the end, or for `patience` seconds."""
        if len(self.deltas) == seen and not self.over:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience):
                    await self._news.wait()
        return self.deltas[seen:]

    def join(self) -> None:
        self._joins += 1
        self._record_joins()

    def deliver(self) -> None:
        """The last byte was handed to a socket without error."""
        if not self.delivered and self.number is not None and not self._session.closed:
            self._session.log.append(Delivered(call=self.number, at=time.time()))
            self._session.conversation.delivered(self.number)
            self.delivered = True

    async def run(self) -> None:
        try:
            place, plan = await self._prepare()
            self._open(place, plan)
            last = await self._sample(place)
            self._finish(place, last)
        except Refusal as refusal:
            self._session.refuse(self.dialect, refusal)
            self._fail(refusal)
        except asyncio.CancelledError:
            self._close_record("abort")
            raise
        except PolarError as fault:
            self._close_record("error", fault)
            self._fail(self._session.blame(fault))
        except Exception as error:
            log.exception("a model call failed", session=self._session.attempt.session_id, call=self.number)
            bug = ServerFault(f"{type(error).__name__}: {error}")
            self._close_record("error", bug)
            self._fail(self._session.blame(bug))

    def abandon(self) -> None:
        """Its task has ended; whoever still follows an unanswered call is told."""
        if not self.over:
            self._fail(Refusal("engine", "the call was cut off"))

    # Before the engine

    async def _prepare(self) -> tuple[Place, Plan | None]:
        conversation, ask = self._session.conversation, self.ask
        place = await self._work(conversation.place, ask.messages, ask.tools)
        if not self._session.engine.takes_ids:
            return place, None
        try:
            plan = await self._work(conversation.plan, place, ask.messages, ask.tools)
        except TaskFault as fault:
            raise Refusal("bad_request", fault.message) from fault
        length, context = len(plan.ids), self._session.context_length
        if context is not None and length >= context:
            raise context_refusal(length, context)
        return place, plan

    def _open(self, place: Place, plan: Plan | None) -> None:
        session, ask = self._session, self.ask
        number = session.log.calls + 1
        tools_from = session.conversation.tools_from(place)
        length = None if plan is None else len(plan.ids)
        rendering = session.rendering
        names = (session.attempt.session_index, session.attempt.attempt, number)
        self._sampling = effective(
            ask.sampling,
            session.attempt.task.sampling,
            names=names,
            room=session.room(length),
            stop_ids=rendering.stop_ids if rendering is not None else (),
        )
        session.log.append(
            Opened(
                call=number,
                at=time.time(),
                dialect=self.dialect,
                body=zstandard.ZstdCompressor(level=1).compress(self._raw),
                model=ask.model,
                stream=ask.stream,
                auxiliary=self.auxiliary,
                sampling=self._sampling,
                messages_base=place.base,
                messages_keep=place.keep,
                messages=ask.messages[place.keep :],
                tools_from=tools_from,
                tools=ask.tools if tools_from is None else None,
            )
        )
        self.number, self._raw = number, b""
        names_text = f"{session.attempt.session_id}:{session.attempt.attempt}:{number}".encode()
        self.opening.id = hashlib.blake2b(names_text, digest_size=12).hexdigest()
        session.conversation.opened(number, place)
        self._record_joins()
        if plan is not None:
            self._stand(place, plan)
        if rendering is not None and session.engine.takes_ids and ask.stream:
            self._reader = rendering.reader(ask.offered, self._sampling.get("stop") or [])

    def _stand(self, place: Place, plan: Plan) -> None:
        assert self.number is not None
        self._session.log.append(self._session.conversation.prompt(self.number, place, plan))
        self._prompt_ids = plan.ids
        self.opening.prompt_tokens = len(plan.ids)

    async def _work(self, function: Any, *arguments: Any) -> Any:
        if len(self._raw) > HEAVY_BYTES:
            return await asyncio.to_thread(function, *arguments)
        return function(*arguments)

    # The engine

    async def _sample(self, place: Place) -> Piece:
        faults = aborts = 0
        while True:
            before = self._count
            try:
                last = await self._session.gate.run(self._ask_engine(place))
            except EngineFault as fault:
                faults += 1
                if faults >= _TRIES or not self._may_ask_again(fault):
                    raise
                await asyncio.sleep(self._session.backoff * 2 ** (faults - 1))
                continue
            finally:
                self._flush()
            if last is not None and last.finish_reason != "abort":
                return last
            aborts = aborts + 1 if self._count == before else 0
            if aborts > _ENDLESS_ABORTS or (self._count and not self._session.engine.takes_ids):
                raise EngineFault("the engine aborted the call, and it cannot be continued", name="engine_aborted")
            if self._count >= self._sampling["max_tokens"]:
                return Piece(ids=np.empty(0, IDS), finish_reason="length")
            # An engine that is about to take new weights aborts again at once.
            await asyncio.sleep(min(0.02 * 2**aborts, 1.0) if aborts else 0)

    def _may_ask_again(self, fault: EngineFault) -> bool:
        if fault.name in ("engine_timeout", "engine_lies"):
            return False
        return not self.deltas and (self._session.engine.takes_ids or not self._count)

    async def _ask_engine(self, place: Place) -> Piece:
        engine, last = self._session.engine, None
        async with aclosing(engine.generate(self._engine_call())) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                self._take(place, piece)
                last = piece
        if last is None or last.finish_reason is None:
            raise EngineFault("the engine's answer has no end", name="engine_error")
        return last

    def _engine_call(self) -> EngineCall:
        session, ask = self._session, self.ask
        sampling = self._sampling | {"max_tokens": self._sampling["max_tokens"] - self._count}
        call = EngineCall(rid=session.request_id(), stream=ask.stream, sampling=sampling)
        if session.engine.takes_ids:
            assert self._prompt_ids is not None
            call.prompt_ids = np.concatenate([self._prompt_ids, *self._ids])
        else:
            call.messages, call.tools, call.tool_choice = ask.messages, ask.tools, ask.tool_choice
        return call

    def _take(self, place: Place, piece: Piece) -> None:
        if piece.prompt_ids is not None and self._prompt_ids is None:
            self._stand(place, Plan(ids=piece.prompt_ids, source="engine"))
        if len(piece.ids):
            self._first_token_at = self._first_token_at or time.time()
            self._count += len(piece.ids)
            self._session.record.sampled += len(piece.ids)
            self._ids.append(piece.ids)
            if self._chunk and self._chunk[-1].version != piece.version:
                self._write_chunk()
            self._chunk.append(piece)
        if self._reader is not None:
            self._relay(self._reader.feed(piece.ids))
        elif piece.text and self.ask.stream and not self._session.engine.takes_ids:
            self._relay([Delta(kind="text", text=piece.text)])

    def _relay(self, deltas: list[Delta]) -> None:
        if deltas:
            self._relayed += "".join(delta.text for delta in deltas if delta.kind == "text")
            self.deltas += deltas
            self._notify()

    # After the engine

    def _finish(self, place: Place, last: Piece) -> None:
        session = self._session
        message = self._message(last)
        reason = "length" if last.finish_reason == "length" else "tool_calls" if "tool_calls" in message else "stop"
        session.log.append(
            Finished(
                call=self.number or 0,
                at=time.time(),
                finish_reason=reason,
                matched=last.matched,
                message=message,
                text=self._text(),
                first_token_at=self._first_token_at,
                over_limit=session.over_limit(self._count),
                usage=last.usage,
            )
        )
        session.conversation.answered(self.number or 0, place, message)
        session.completed(self)
        self._relay(self._remainder(message))
        self.opening.prompt_tokens = last.usage.get("prompt_tokens", self.opening.prompt_tokens)
        self.answer = Answer(
            opening=self.opening,
            message=message,
            finish_reason=reason,
            matched=last.matched if isinstance(last.matched, str) else None,
            completion_tokens=last.usage.get("completion_tokens", self._count),
        )
        self._notify()

    def _message(self, last: Piece) -> Message:
        rendering = self._session.rendering
        if last.message is not None:
            message = dict(last.message)
        elif rendering is not None:
            message = rendering.parse(np.concatenate([np.empty(0, IDS), *self._ids]), self.ask.offered)
            message["content"] = _before_stop(message["content"], self._sampling.get("stop") or [])
        else:
            raise EngineFault("the engine's answer has no message", name="engine_error")
        if not message["content"].startswith(self._relayed):
            message["content"] = self._relayed
        if calls := message.get("tool_calls"):
            message["tool_calls"] = [
                {"id": call.get("id") or f"call_{self.opening.id}{at:02d}", **_without_id(call)}
                for at, call in enumerate(calls)
            ]
        return message

    def _remainder(self, message: Message) -> list[Delta]:
        """What of the message was held back."""
        reasoning, content = message.get("reasoning_content"), message["content"][len(self._relayed) :]
        told = any(delta.kind == "reasoning" for delta in self.deltas)
        deltas = [Delta(kind="reasoning", text=reasoning)] if reasoning and not told else []
        deltas += [Delta(kind="text", text=content)] if content else []
        return deltas + [Delta(kind="tool_call", call=call) for call in message.get("tool_calls", [])]

    def _text(self) -> str:
        rendering = self._session.rendering
        return rendering.decode(np.concatenate(self._ids)) if rendering is not None and self._ids else ""

    def _fail(self, failure: Refusal) -> None:
        self.failure = failure
        self._notify()

    def _close_record(self, reason: str, fault: PolarError | None = None) -> None:
        """Ends the record of a call without an answer. A full disk is the session's fault already."""
        if self.number is None:
            return
        with suppress(ServerFault):
            self._flush()
            self._session.log.append(
                Finished(
                    call=self.number,
                    at=time.time(),
                    finish_reason=reason,
                    text=self._text(),
                    first_token_at=self._first_token_at,
                    fault=fault.name if fault else None,
                    error=fault.message if fault else None,
                )
            )

    def _flush(self) -> None:
        self._write_chunk()
        if self.number is not None and self._ids:
            self._ids = [np.concatenate(self._ids)]
            self._session.conversation.sampled(self.number, self._ids[0])

    def _write_chunk(self) -> None:
        """The pieces of one policy version as one record."""
        pieces, self._chunk = self._chunk, []
        if pieces and self.number is not None:
            ids = np.concatenate([piece.ids for piece in pieces])
            known = [piece.logprobs for piece in pieces if piece.logprobs is not None]
            logprobs = np.concatenate(known).astype(LOGPROBS) if len(known) == len(pieces) else None
            self._session.log.append(Chunk(call=self.number, ids=ids, logprobs=logprobs, version=pieces[0].version))

    def _record_joins(self) -> None:
        while self._joins and self.number is not None and not self._session.closed:
            self._joins -= 1
            self._session.log.append(Joined(call=self.number, at=time.time()))

    def _notify(self) -> None:
        self._news.set()
        self._news = asyncio.Event()


def context_refusal(length: int, context: int) -> Refusal:
    return Refusal("context", f"prompt is too long: {length} tokens > {context} maximum context length")


def _before_stop(content: str, stops: list[str]) -> str:
    found = [at for stop in stops if stop and (at := content.find(stop)) >= 0]
    return content[: min(found)] if found else content


def _without_id(call: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name != "id"}
