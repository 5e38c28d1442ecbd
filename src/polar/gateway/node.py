"""The gateway: polls the rollout server, takes leases while it has room, carries sessions out, hands results back.

A gateway that cannot reach the server goes on with what it has; a gateway that is stopped leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec
import structlog
from pydantic import ValidationError

from polar.config import NodeSettings, describe
from polar.errors import ConfigError, ServerFault, from_os_error
from polar.gateway.control import control_routes
from polar.gateway.disk import Disk
from polar.gateway.engine_watch import EngineWatch
from polar.gateway.link import Refused, ServerLink
from polar.gateway.orders import Orders
from polar.gateway.outbox import Outbox
from polar.gateway.outcome import Outcome
from polar.gateway.resources import resources
from polar.gateway.session import NodeFacts, Session
from polar.gateway.stages import Stages
from polar.harnesses import HARNESSES
from polar.nodeapi import Held, Lease, NodeResult, PollReply, PollRequest, Workers, WorkReply, WorkRequest
from polar.proxy import make_engine
from polar.records import SessionStatus, Termination
from polar.runtimes import RUNTIMES, Launcher, sweep

log = structlog.get_logger("polar.gateway")
_NO_ROOM = Workers(init=0, run=0, postrun=0)
_RETRY_SECONDS = 1.0
_HEAD_START_SECONDS = 5.0
_GOODBYE_SECONDS = 2.0
_ENGINE_FAULTS = frozenset({"engine_down", "engine_error", "engine_timeout", "engine_lies"})


class Gateway:
    """One node. `data` is its folder: disposable once every log in it has been taken by the server."""

    def __init__(
        self, node: NodeSettings, *, server_url: str, token: str, data: Path, heartbeat_seconds: float = 5.0
    ) -> None:
        self.node = node
        self.url = node.url
        self.epoch = _next_epoch(data / "epoch")
        self.stages = Stages(
            Workers(init=node.max_init_workers, run=node.max_run_workers, postrun=node.max_postrun_workers)
        )
        self.sessions: dict[tuple[str, int], Session] = {}
        self.watch: EngineWatch | None = None
        self.token = token
        self._data = data
        self._outbox = Outbox(data / "outbox")
        self._disk = Disk(data)
        self._link = ServerLink(server_url, token)
        self._launcher = Launcher()
        self._runtimes = _offered(node)
        _check_tokenizer(node)
        self._resources = resources(node.resources)
        self._heartbeat = heartbeat_seconds
        self._delivering: set[tuple[str, int]] = set()
        self._news = asyncio.Event()
        """the server is told before the next heartbeat is due"""
        self._known = asyncio.Event()
        """the server has heard of this life"""
        self.orders = Orders(self._news)
        self._given_back: list[NodeResult] = []
        self._complaints = _Complaints()
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self, ready: Callable[[str], None] | None = None) -> None:
        """Runs until it is cancelled. `ready` is told the gateway's URL once the engine has been found healthy."""
        inference = self.node.inference
        await sweep(self._data / "sandboxes")
        await asyncio.to_thread(self._outbox.rescue, self.node.id, self.epoch)
        engine = await make_engine(inference.engine, inference.base_url, inference.patience_seconds)
        self.watch = EngineWatch(engine, self.node, self._news)
        try:
            async with self._link, self._launcher:
                try:
                    async with asyncio.TaskGroup() as self._tasks:
                        self._tasks.create_task(self.watch.watch())
                        self._tasks.create_task(self._disk.watch())
                        self._tasks.create_task(self._come_back())
                        self._tasks.create_task(self._serve(ready))
                finally:
                    await self._say_goodbye()
        finally:
            if self.watch.proxy is not None:
                await self.watch.proxy.stop()
            await engine.close()

    async def _serve(self, ready: Callable[[str], None] | None) -> None:
        assert self.watch is not None
        await self.watch.ready.wait()
        assert self.watch.proxy is not None
        url = await self.watch.proxy.start(self.node.host, self.node.port, control_routes(self))
        self.url = self.node.public_url or url
        self._news.set()
        if ready is not None:
            ready(self.url)
        await self._work_for_ever()

    async def _come_back(self) -> None:
        """What an earlier life has finished goes first: the first poll gives all else of it up."""
        assert self._tasks is not None
        waiting = [self._tasks.create_task(self._outbox.deliver(each, self._link)) for each in self._outbox.waiting()]
        if waiting:
            await asyncio.wait(waiting, timeout=_HEAD_START_SECONDS)
        await self._poll_for_ever()

    # What the server tells

    async def _poll_for_ever(self) -> None:
        while True:
            acked = self.orders.acknowledged[:]
            self._news.clear()
            try:
                reply = await self._link.poll(self._poll_request(acked))
            except Refused as refusal:
                raise _fatal(self.node.id, refusal) from refusal
            except ServerFault as fault:
                self._complaints.say("poll failed", fault.message)
                await asyncio.sleep(min(_RETRY_SECONDS, self._heartbeat))
                continue
            self._complaints.over("poll failed")
            self._known.set()
            self.orders.heard(acked)
            self._hear(reply)
            with suppress(TimeoutError):  # not wait_for: before Python 3.12 it can lose a cancellation
                async with asyncio.timeout(self._heartbeat):
                    await self._news.wait()

    async def _work_for_ever(self) -> None:
        await self._known.wait()
        while True:
            try:
                reply = await self._ask()
            except Refused as refusal:
                raise _fatal(self.node.id, refusal) from refusal
            except ServerFault as fault:
                self._complaints.say("asking for work failed", fault.message)
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            self._complaints.over("asking for work failed")
            self._hear(reply)

    async def _ask(self) -> WorkReply:
        """A gateway without room asks too, because cancellations come this way at once; it asks anew when it has."""
        if self._has_room():
            return await self._link.work(self._work_request(self.stages.room(len(self.sessions))))
        asking = asyncio.create_task(self._link.work(self._work_request(_NO_ROOM)))
        room = asyncio.create_task(self._room())
        try:
            await asyncio.wait({asking, room}, return_when=asyncio.FIRST_COMPLETED)
            return asking.result() if asking.done() else WorkReply()
        finally:
            asking.cancel()
            room.cancel()
            await asyncio.gather(asking, room, return_exceptions=True)

    def _has_room(self) -> bool:
        assert self.watch is not None
        free = self.stages.room(len(self.sessions)).init > 0
        return free and self.watch.state.healthy and not self.orders.draining

    async def _room(self) -> None:
        """Returns when there is room for a session, and an engine to serve it."""
        while not self._has_room():
            self.stages.changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(_RETRY_SECONDS):
                    await self.stages.changed.wait()

    def _work_request(self, room: Workers) -> WorkRequest:
        return WorkRequest(node_id=self.node.id, epoch=self.epoch, room=room)

    def _poll_request(self, acked: list[str]) -> PollRequest:
        """Leases come through /node/work alone: a poll offers no room."""
        assert self.watch is not None
        return PollRequest(
            node_id=self.node.id,
            epoch=self.epoch,
            gateway_url=self.url,
            workers=self.stages.workers,
            room=_NO_ROOM,
            metrics=self.stages.metrics(),
            engine=self.watch.state,
            resources=self._resources,
            labels=self.node.labels,
            runtimes=sorted(self._runtimes),
            harnesses=sorted(HARNESSES),
            held=self._held(),
            acked=acked,
            heartbeat_interval_seconds=self._heartbeat,
        )

    def _held(self) -> list[Held]:
        live = [
            Held(session_id=key[0], attempt=key[1], stage=session.stage, sampled_tokens=session.sampled)
            for key, session in self.sessions.items()
        ]
        done = [
            Held(session_id=key[0], attempt=key[1], stage=SessionStatus.POST_RUN)
            for key in self._delivering - self.sessions.keys()
        ]
        return live + done

    def _hear(self, reply: PollReply | WorkReply) -> None:
        """All of it may come twice: leases, orders and cancellations are known by their ids."""
        assert self.watch is not None and self._tasks is not None
        for cancel in reply.cancels:
            session = self.sessions.get((cancel.session_id, cancel.attempt))
            if session is not None:
                session.stop(cancel.why)
        for order in reply.orders:
            self.orders.obey(order, self.watch, self._tasks)
        for lease in reply.leases:
            self._take(lease)

    # Carrying out

    def _take(self, lease: Lease) -> None:
        assert self.watch is not None and self.watch.proxy is not None and self._tasks is not None
        key = (lease.session_id, lease.attempt)
        if key in self.sessions or key in self._delivering:
            return
        facts = NodeFacts(
            node_id=self.node.id,
            epoch=self.epoch,
            sandboxes=self._data / "sandboxes",
            default_runtime=self.node.default_runtime,
            stages=self.stages,
            proxy=self.watch.proxy,
            outbox=self._outbox,
            disk=self._disk,
            launcher=self._launcher,
            runtimes=self._runtimes,
        )
        try:
            session = Session(lease, facts)
        except ValidationError as error:
            self._delivering.add(key)
            self._tasks.create_task(self._give_back(lease, error))
            return
        self.sessions[key] = session
        self._tasks.create_task(self._carry(session))

    async def _give_back(self, lease: Lease, error: ValidationError) -> None:
        """The server is of another version than this gateway; another gateway may understand the task."""
        why = describe(error)
        outcome = Outcome(fault=ServerFault(f"{self.node.id} does not understand the task: {why}", name="task_unknown"))
        log.error("a lease was given back", session=lease.session_id, why=why)
        try:
            await self._hand_back(
                outcome.result(
                    session_id=lease.session_id,
                    attempt=lease.attempt,
                    node_id=self.node.id,
                    epoch=self.epoch,
                    evaluator=None,
                    sampled=0,
                )
            )
        finally:
            self._delivering.discard((lease.session_id, lease.attempt))

    async def _carry(self, session: Session) -> None:
        try:
            result = await session.run()
        except asyncio.CancelledError:
            self._given_back.append(session.given_back())
            raise
        finally:
            self._delivering.add(session.id)
            del self.sessions[session.id]
            self.stages.changed.set()
        try:
            await self._hand_back(result)
        finally:
            self._delivering.discard(session.id)

    async def _say_goodbye(self) -> None:
        """What a stop has ended may begin anew elsewhere at once. What does not reach the server now waits on disk."""
        kept = []
        for result in self._given_back:
            try:
                kept.append(await asyncio.to_thread(self._outbox.put, result))
            except (OSError, ServerFault) as error:  # the next start reports the attempt as lost
                log.error("cannot keep a result", session=result.session_id, why=str(error))
        with suppress(TimeoutError):
            async with asyncio.timeout(_GOODBYE_SECONDS):
                await asyncio.gather(*(self._outbox.deliver(path, self._link) for path in kept))

    async def _hand_back(self, result: NodeResult) -> None:
        assert self.watch is not None
        if result.fault in _ENGINE_FAULTS:
            self.watch.doubt()
        try:
            path = await asyncio.to_thread(self._outbox.put, result)
        except (OSError, ServerFault) as error:
            with suppress(Refused):
                await self._outbox.send(_without_disk(result, error), self._link)
            return
        await self._outbox.deliver(path, self._link)


class _Complaints:
    """What fails again and again for the same reason is said once, and that it is over."""

    def __init__(self) -> None:
        self._said: dict[str, str] = {}

    def say(self, what: str, why: str) -> None:
        if self._said.get(what) != why:
            self._said[what] = why
            log.warning(what, why=why)

    def over(self, what: str) -> None:
        if self._said.pop(what, None) is not None:
            log.info(f"no longer: {what}")


def _next_epoch(file: Path) -> int:
    """Later than that of every earlier life with this folder, also where the machine's clock was set back."""
    last = 0
    with suppress(OSError, ValueError):
        last = int(file.read_text())
    epoch = max(time.time_ns() // 1_000_000, last + 1)
    with suppress(OSError):  # a full disk: the clock alone has to do
        partial = file.with_suffix(".part")
        partial.write_text(str(epoch))
        partial.rename(file)
    return epoch


def _offered(node: NodeSettings) -> frozenset[str]:
    """Every sandbox there is; `local`, whose agents can reach whatever this process can, only where it is asked for.
    Raises ConfigError for a default that there is not."""
    if node.default_runtime is not None and node.default_runtime not in RUNTIMES:
        known = ", ".join(sorted(RUNTIMES))
        raise ConfigError(f"default_runtime (--runtime) is {node.default_runtime!r}: known are {known}")
    return frozenset(name for name in RUNTIMES if name != "local" or node.default_runtime == "local")


def _check_tokenizer(node: NodeSettings) -> None:
    """Waiting for a folder that is not there would be for ever. Raises ConfigError."""
    folder = node.inference.tokenizer
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(f"the tokenizer (inference.tokenizer, --tokenizer) {folder} is no folder")


def _without_disk(result: NodeResult, error: OSError | ServerFault) -> NodeResult:
    """The result of an attempt whose log cannot be kept: an infrastructure fault, and no trajectory without a log."""
    fault = from_os_error(error, "keeping the result") if isinstance(error, OSError) else error
    return msgspec.structs.replace(
        result,
        status=SessionStatus.ERROR,
        termination=Termination.INFRASTRUCTURE,
        retryable=True,
        fault=fault.name,
        error=fault.message,
        traces=None,
        tokens=None,
        calls=None,
        evaluation=None,
        log_sha256=None,
    )


def _fatal(node_id: str, refusal: Refused) -> Exception:
    if refusal.status == 409:
        return ConfigError(f"a newer gateway runs as {node_id!r}: give this one an id of its own ({refusal.message})")
    if refusal.status == 401:
        return ConfigError("the rollout server refuses the control token: set POLAR_CONTROL_PLANE_TOKEN to its own")
    return refusal
