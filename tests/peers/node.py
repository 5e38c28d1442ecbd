"""A scripted gateway: it speaks the node API over HTTP and carries no session out."""

from __future__ import annotations

import hashlib
from typing import Any, TypeVar

import httpx
import msgspec
import numpy as np

from polar.codec import from_msgpack, to_msgpack
from polar.config import TOKEN_HEADER
from polar.nodeapi import (
    EngineState,
    Held,
    Lease,
    NodeResult,
    PollReply,
    PollRequest,
    ResultReply,
    Uploaded,
    Workers,
    WorkReply,
    WorkRequest,
)
from polar.records import (
    CallCounts,
    EvaluationResult,
    GatewayMetrics,
    SessionStatus,
    SessionTiming,
    Termination,
    TokenLedger,
    Trace,
)

T = TypeVar("T")
HEALTHY = EngineState(kind="scripted", healthy=True, version="1")


class Node:
    """One gateway; `epoch` and `engine` are the test's to change."""

    def __init__(self, url: str, token: str, node_id: str = "node-a", epoch: int = 1, **facts: Any) -> None:
        self.node_id, self.epoch, self.engine = node_id, epoch, HEALTHY
        self.facts = {"runtimes": ["bubblewrap"], "harnesses": ["shell", "mini_swe_agent"]} | facts
        self.held: list[Held] = []
        self.acked: list[str] = []
        self.http = httpx.Client(base_url=url, headers={TOKEN_HEADER: token}, timeout=40, trust_env=False)

    def poll(self) -> PollReply:
        return self.post("/node/poll", self.report(), PollReply)

    def report(self) -> PollRequest:
        return PollRequest(
            node_id=self.node_id,
            epoch=self.epoch,
            gateway_url="http://127.0.0.1:1",
            workers=Workers(init=4, run=2, postrun=4),
            room=Workers(init=0, run=0, postrun=0),
            metrics=GatewayMetrics(),
            engine=self.engine,
            held=self.held,
            acked=self.acked,
            **self.facts,
        )

    def work(self, room: int = 4) -> WorkReply:
        request = WorkRequest(node_id=self.node_id, epoch=self.epoch, room=Workers(init=room, run=room, postrun=room))
        return self.post("/node/work", request, WorkReply)

    def lease(self, count: int = 1) -> list[Lease]:
        """Polls, then asks until it has `count` leases."""
        self.poll()
        leases: list[Lease] = []
        while len(leases) < count:
            leases += self.work(count - len(leases)).leases
        return leases

    def upload(self, lease: Lease, data: bytes, offset: int = 0) -> Uploaded:
        answer = self.http.put(f"{_path(lease)}/log", params={"offset": offset}, content=data)
        answer.raise_for_status()
        return from_msgpack(answer.content, Uploaded)

    def result(self, result: NodeResult) -> ResultReply:
        return self.post(f"/node/sessions/{result.session_id}/{result.attempt}/result", result, ResultReply)

    def finish(self, lease: Lease, reward: float = 1.0, **changes: Any) -> ResultReply:
        log = f"log of {lease.session_id}.{lease.attempt}".encode()
        self.upload(lease, log)
        changes = {"log_sha256": hashlib.sha256(log).hexdigest()} | changes
        return self.result(done(lease, self, reward=reward, **changes))

    def post(self, path: str, record: msgspec.Struct, kind: type[T]) -> T:
        answer = self.http.post(path, content=to_msgpack(record))
        answer.raise_for_status()
        return from_msgpack(answer.content, kind)


def _path(lease: Lease) -> str:
    return f"/node/sessions/{lease.session_id}/{lease.attempt}"


def done(lease: Lease, node: Node, reward: float | None = 1.0, **changes: Any) -> NodeResult:
    """A complete result with one trace of three sampled tokens."""
    trace = Trace(
        prompt_ids=np.arange(4),
        response_ids=np.array([50, 51, 9]),
        loss_mask=np.ones(3),
        response_logprobs=np.array([-0.5, -0.25, -0.125]),
        finish_reason="stop",
        reward=reward,
        weight_versions=[(0, 3, "1")],
    )
    result = NodeResult(
        session_id=lease.session_id,
        attempt=lease.attempt,
        node_id=node.node_id,
        epoch=node.epoch,
        status=SessionStatus.COMPLETED,
        termination=Termination.DONE,
        traces=[trace],
        run_termination=Termination.DONE,
        tokens=TokenLedger(sampled=3, trainable=3),
        calls=CallCounts(completions=1),
        evaluation=EvaluationResult(outcome_reward=reward),
        evaluator="session_completed",
        timing=SessionTiming(run_ms=12.0),
    )
    return msgspec.structs.replace(result, **changes)


def fault(lease: Lease, node: Node, **changes: Any) -> NodeResult:
    """An infrastructure fault: nothing was built."""
    facts: dict[str, Any] = {
        "status": SessionStatus.ERROR,
        "termination": Termination.SANDBOX_START,
        "retryable": True,
        "fault": "sandbox_start",
        "error": "no sandbox",
        "traces": None,
        "tokens": None,
        "calls": None,
        "evaluation": None,
        "log_sha256": None,
    }
    return done(lease, node, **(facts | changes))
