"""Machines without surroundings: requests, reports and results for tests that call the state machine itself."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np

from polar.nodeapi import EngineState, Held, NodeResult, PollRequest, Workers
from polar.records import CallCounts, GatewayMetrics, Resources, SessionStatus, Termination, TokenLedger, Trace
from polar.requests import TaskRequest
from polar.server.machine import Machine
from polar.server.state import Attempt, Task
from polar.server.submission import new_task
from polar.server.tables import Tables

LEASE, DELIVERY = 30.0, 100.0
ENGINE = EngineState(kind="scripted", healthy=True)
PLENTY = Resources(cpus=64, memory_mb=1 << 20, gpus=8)


def request_for(task_id: str, samples: int = 1, attempts: int = 2, **fields: Any) -> TaskRequest:
    document = {
        "task_id": task_id,
        "instruction": "x",
        "num_samples": samples,
        "agent": {"harness": "mini_swe_agent"},
        "callback_url": "http://127.0.0.1:9/first",
        "max_attempts": attempts,
    }
    return TaskRequest.model_validate(document | fields)


def submit(machine: Machine, request: TaskRequest, now: float = 0.0) -> Task:
    task = new_task(request, machine.queue_clock(now), 0.0)
    machine.submit(task)
    machine.admit(task)
    return task


def result_for(session_id: str, attempt: int, termination: Termination, **changes: Any) -> NodeResult:
    good = termination is Termination.DONE
    result = NodeResult(
        session_id=session_id,
        attempt=attempt,
        node_id="a",
        epoch=1,
        status=SessionStatus.COMPLETED if good else SessionStatus.ERROR,
        termination=termination,
        retryable=termination is Termination.INFRASTRUCTURE,
        traces=[] if good else None,
        tokens=TokenLedger(sampled=7, trainable=7),
        calls=CallCounts(completions=2),
    )
    return msgspec.structs.replace(result, **changes)


def one_trace() -> Trace:
    return Trace(prompt_ids=np.arange(2), response_ids=np.arange(2), loss_mask=np.ones(2))


def report(node: str, epoch: int = 1, held: list[Held] | None = None, **facts: Any) -> PollRequest:
    request = PollRequest(
        node_id=node,
        epoch=epoch,
        gateway_url="",
        workers=Workers(init=2, run=2, postrun=2),
        room=Workers(init=0, run=0, postrun=0),
        metrics=GatewayMetrics(),
        engine=ENGINE,
        resources=PLENTY,
        harnesses=["mini_swe_agent"],
        held=held or [],
    )
    return msgspec.structs.replace(request, **facts)


def poll(
    machine: Machine, node: str, now: float = 0.0, epoch: int = 1, held: tuple[str, int] | None = None, **facts: Any
) -> list[str]:
    """Why it must let go of what it holds."""
    names = [] if held is None else [Held(session_id=held[0], attempt=held[1], stage=SessionStatus.RUNNING)]
    return [cancel.why for cancel in machine.poll(report(node, epoch, names, **facts), now, 0.0)]


def ask(machine: Machine, node: str, now: float, room: int = 1) -> None:
    workers = Workers(init=room, run=room, postrun=room)
    assert machine.ask(node, machine.fleet.nodes[node].epoch, workers, now) is not None


def take(machine: Machine, node: str, now: float, room: int = 1) -> list[Attempt]:
    """What the node gets when it asks."""
    ask(machine, node, now, room)
    leases = machine.place(now)
    machine.fleet.nodes[node].asking = None
    return leases


def finish(machine: Machine, attempt: Attempt, now: float) -> None:
    assert machine.result(result_for(attempt.session_id, attempt.number, Termination.DONE), now).accepted


def scene(attempts: int = 2, samples: int = 1, **fields: Any) -> tuple[Machine, Task]:
    """A task, and the gateways a and b, of which a has taken the first session."""
    machine = Machine(LEASE, DELIVERY)
    task = submit(machine, request_for("one", samples, attempts, **fields))
    for node in ("a", "b"):
        poll(machine, node)
    take(machine, "a", 0.0)
    return machine, task


def expire(machine: Machine) -> float:
    """Every lease that nobody renews runs out."""
    for second in range(int(LEASE) + 2):
        machine.tick(float(second))
    return LEASE + 1


def save(machine: Machine, disk: Tables, now: float) -> None:
    disk.commit([(type(row), disk.values(row)) for row in machine.dirty.values()], now)
    machine.dirty.clear()


def start_from(disk: Tables, lease_seconds: float = LEASE, delivery_seconds: float = DELIVERY) -> Machine:
    """A server that starts from what was saved."""
    machine = Machine(lease_seconds, delivery_seconds)
    machine.fleet.load(disk.nodes(), disk.pause())
    for task in disk.tasks():
        machine.adopt(task)
    machine.restart(disk.uptime())
    return machine
