"""Who gets which session: priority, fairness, labels, resources, and room held for those who would wait for ever."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.conftest import Server, eventually
from tests.server.machines import (
    DELIVERY,
    ENGINE,
    LEASE,
    ask,
    finish,
    poll,
    request_for,
    result_for,
    submit,
    take,
)

from polar.nodeapi import EngineState
from polar.records import Resources, Termination
from polar.server.line import PATIENCE_SECONDS
from polar.server.machine import Machine
from polar.server.needs import NOTHING, Amount, needs_of
from polar.server.state import Attempt, Task

TWO = Resources(cpus=2, memory_mb=1000, gpus=1)


def machine_with(*nodes: str, **facts: Any) -> Machine:
    machine = Machine(LEASE, DELIVERY)
    for node in nodes:
        poll(machine, node, **facts)
    return machine


def tasks_of(machine: Machine, leases: list[Attempt]) -> list[str]:
    return [machine.sessions[attempt.session_id].task_id for attempt in leases]


# Turns


def test_priority_first_then_a_session_from_each_task_in_turn() -> None:
    machine = machine_with("a")
    for task_id, priority in (("big", 0), ("small", 0), ("urgent", 9)):
        submit(machine, request_for(task_id, 3, dispatch_priority=priority))
    order = tasks_of(machine, take(machine, "a", 0.0, room=7))
    assert order == ["urgent", "urgent", "urgent", "big", "small", "big", "small"]


def test_turns_are_kept_between_tasks_that_ask_for_different_things() -> None:
    machine = machine_with("a")
    submit(machine, request_for("one", 3, runtime={"cpus": 1}))
    submit(machine, request_for("two", 3))
    assert tasks_of(machine, take(machine, "a", 0.0, room=4)) == ["one", "two", "one", "two"]


def test_sessions_spread_over_the_nodes_that_ask() -> None:
    machine = machine_with("a", "b", "c")
    submit(machine, request_for("one", 6))
    for node in ("a", "b", "c"):
        ask(machine, node, 0.0, room=4)
    assert Counter(attempt.node_id for attempt in machine.place(0.0)) == {"a": 2, "b": 2, "c": 2}


def test_no_lease_goes_to_a_node_that_cannot_carry_it_out() -> None:
    machine = machine_with("a")
    submit(machine, request_for("one"))
    ill = EngineState(kind="scripted", healthy=False, problem="it does not answer")
    for engine, harnesses in ((ill, ["mini_swe_agent"]), (ENGINE, ["shell"])):
        poll(machine, "a", engine=engine, harnesses=harnesses)
        assert take(machine, "a", 0.0) == []
    poll(machine, "a")
    machine.fleet.drain(machine.fleet.nodes["a"])
    assert take(machine, "a", 0.0) == []
    assert [order.kind for order in machine.fleet.nodes["a"].orders] == ["drain"]
    poll(machine, "a", epoch=2)
    assert len(take(machine, "a", 0.0)) == 1


def test_node_that_becomes_able_while_it_asks_is_looked_at_again() -> None:
    machine = machine_with("a", labels={"zone": "x"})
    submit(machine, request_for("one", node_labels={"zone": "y"}))
    ask(machine, "a", 0.0)
    assert machine.place(0.0) == []
    poll(machine, "a", labels={"zone": "y"})
    assert len(machine.place(0.0)) == 1


# Labels and resources


def test_labels_lead_to_the_nodes_that_have_them() -> None:
    machine = machine_with("a")
    poll(machine, "b", labels={"zone": "x", "disk": "fast"})
    submit(machine, request_for("one", 2, node_labels={"zone": "x", "disk": "fast"}))
    for node in ("a", "b"):
        ask(machine, node, 0.0, room=4)
    assert [attempt.node_id for attempt in machine.place(0.0)] == ["b", "b"]


def test_leases_reserve_what_their_tasks_ask_for_until_they_end() -> None:
    machine = machine_with("a", resources=TWO)
    submit(machine, request_for("one", 4, runtime={"cpus": 0.7, "memory_mb": 300}))
    first, second = take(machine, "a", 0.0, room=4)
    assert machine.fleet.nodes["a"].reserved == Amount(1400, 600, 0)
    assert take(machine, "a", 0.0, room=4) == []
    finish(machine, first, 1.0)
    assert len(take(machine, "a", 1.0, room=4)) == 1
    machine.result(result_for(second.session_id, 1, Termination.INFRASTRUCTURE), 1.0)
    assert machine.fleet.nodes["a"].reserved == Amount(700, 300, 0)


def test_a_fresh_evaluation_sandbox_is_reserved_from_the_start() -> None:
    evaluator = {"strategy": "session_completed"}
    runtime = {"cpus": 1.5, "memory_mb": 10, "gpus": 1}
    once = needs_of(request_for("one", runtime=runtime, evaluator=evaluator))
    twice = needs_of(request_for("one", runtime=runtime, evaluator=evaluator | {"refresh_runtime": True}))
    assert (once.amount, twice.amount) == (Amount(1500, 10, 1), Amount(3000, 20, 2))
    assert needs_of(request_for("one")).amount == NOTHING


def test_a_task_that_asks_nothing_reserves_nothing() -> None:
    machine = machine_with("a", resources=Resources())
    submit(machine, request_for("one", 4))
    assert len(take(machine, "a", 0.0, room=4)) == 4


def test_small_sums_are_exact() -> None:
    machine = machine_with("a", resources=Resources(cpus=0.3))
    submit(machine, request_for("one", 4, runtime={"cpus": 0.1}))
    assert len(take(machine, "a", 0.0, room=4)) == 3


# Nobody waits for ever


def small_stream(machine: Machine, number: int, cpus: float = 1.0) -> Task:
    return submit(machine, request_for(f"small{number}", runtime={"cpus": cpus}))


def test_big_session_gets_a_node_although_small_ones_never_cease() -> None:
    """Two nodes of two CPUs; a small session begins and another ends every two seconds on each."""
    machine = machine_with("a", "b", resources=TWO)
    running: dict[str, list[Attempt]] = {"a": [], "b": []}
    for number in range(10):
        small_stream(machine, number)
    for node, leases in running.items():
        leases += take(machine, node, 0.0, room=2)
    submit(machine, request_for("big", runtime={"cpus": 2}))
    placed: list[tuple[float, str]] = []
    for second in range(1, 120):
        small_stream(machine, 10 + second)
        machine.tick(float(second))
        for node in running:
            poll(machine, node, float(second), resources=TWO)
        node = "ab"[second % 2]
        if running[node]:
            finish(machine, running[node].pop(0), float(second))
        leases = take(machine, node, float(second), room=2)
        running[node] += leases
        placed += [(float(second), name) for name in tasks_of(machine, leases)]
    when = next(second for second, name in placed if name == "big")
    assert PATIENCE_SECONDS <= when <= PATIENCE_SECONDS + 10
    meanwhile = [name for second, name in placed if PATIENCE_SECONDS < second < when]
    assert meanwhile, "the other node goes on"


def test_room_is_held_for_one_at_a_time_and_let_go_when_nobody_waits_for_it() -> None:
    machine = machine_with("a", resources=TWO)
    small_stream(machine, 0)
    (running,) = take(machine, "a", 0.0)
    big = submit(machine, request_for("big", 2, runtime={"cpus": 2}))
    for second in range(int(PATIENCE_SECONDS) + 2):
        poll(machine, "a", float(second), held=(running.session_id, 1), resources=TWO)
        assert take(machine, "a", float(second)) == []
        machine.tick(float(second))
    small_stream(machine, 1)
    now = PATIENCE_SECONDS + 2
    assert take(machine, "a", now) == [], "the CPU that is free is held"
    urgent = submit(machine, request_for("urgent", runtime={"cpus": 1}, dispatch_priority=1), now)
    assert tasks_of(machine, take(machine, "a", now)) == ["urgent"], "it was never behind"
    assert urgent.sessions[0].live is not None
    machine.result(result_for(urgent.sessions[0].session_id, 1, Termination.DONE), now)
    machine.cancel(big, now)
    machine.tick(now)
    assert tasks_of(machine, take(machine, "a", now)) == ["small1"]


def test_no_node_is_held_for_what_it_could_never_take() -> None:
    machine = machine_with("a", resources=TWO)
    submit(machine, request_for("huge", runtime={"cpus": 3}))
    submit(machine, request_for("labelled", runtime={"cpus": 2}, node_labels={"zone": "x"}))
    for second in range(int(2 * PATIENCE_SECONDS)):
        poll(machine, "a", float(second), resources=TWO)
        assert take(machine, "a", float(second)) == []
        machine.tick(float(second))
    small_stream(machine, 0)
    assert len(take(machine, "a", 2 * PATIENCE_SECONDS)) == 1


@given(
    st.lists(
        st.tuples(st.integers(0, 1), st.integers(0, 4), st.integers(0, 2), st.booleans()), min_size=1, max_size=20
    ),
    st.lists(st.tuples(st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=3),
)
def test_whatever_fits_some_node_is_placed_in_the_end(
    wishes: list[tuple[int, int, int, bool]], sizes: list[tuple[int, int]]
) -> None:
    machine = Machine(LEASE, DELIVERY)
    sizes = [*sizes, (4, 2)]
    for number, (cpus, gpus) in enumerate(sizes):
        poll(machine, str(number), resources=Resources(cpus=cpus, gpus=gpus), labels={"odd": str(number % 2)})
    for number, (priority, cpus, gpus, labelled) in enumerate(wishes):
        fields: dict[str, Any] = {"dispatch_priority": priority, "runtime": {"cpus": cpus or None, "gpus": gpus}}
        labels = {"odd": str((len(sizes) - 1) % 2)} if labelled else {}
        submit(machine, request_for(f"task{number}", node_labels=labels, **fields))
    now = 0.0
    for _ in range(4 * len(wishes)):
        for number in range(len(sizes)):
            ask(machine, str(number), now, room=2)
        for attempt in machine.place(now):
            node = machine.fleet.nodes[attempt.node_id]
            assert node.reserved.within(node.total)
        now += 10.0
        for node in machine.fleet.nodes.values():
            node.seen_at = now
            for attempt in list(node.leases.values())[:1]:
                finish(machine, attempt, now)
        machine.tick(now)
    assert all(task.status.terminal for task in machine.tasks.values())


# Many


def test_a_look_that_can_place_nothing_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """10,000 waiting tasks and 100 nodes: what matters is that cost does not grow with either where nothing changed."""
    machine = machine_with(*(f"node{number}" for number in range(100)), resources=TWO)
    for number in range(10_000):
        submit(machine, request_for(f"t{number}", 2, runtime={"cpus": 2 + number % 2, "gpus": number % 2}))
    for node in machine.fleet.nodes:
        ask(machine, node, 0.0, room=4)
    filled = timed(lambda: machine.place(0.0))
    assert sum(len(node.leases) for node in machine.fleet.nodes.values()) == 100

    def settle_in_vain() -> None:
        poll(machine, "node7", 1.0, resources=TWO)
        assert machine.unheard(machine.fleet.nodes["node7"], 1.0) == []
        assert machine.place(1.0) == []

    vain = min(timed(settle_in_vain) for _ in range(20))
    ticked = min(timed(lambda: machine.tick(1.0)) for _ in range(20))
    with capsys.disabled():
        print(f"\n100 leases {filled * 1e3:.1f} ms, a poll {vain * 1e6:.0f} µs, a tick {ticked * 1e6:.0f} µs")
    assert vain < 0.01
    assert ticked < 0.01


def timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


# Over HTTP


def problems(answer: Any) -> dict[str, str]:
    assert answer.status_code == 422, answer.text
    return {".".join(map(str, item["loc"])): item["msg"] for item in answer.json()["detail"]}


def test_task_that_fits_no_node_is_refused_by_field_and_waits_while_none_is_there(
    make_server: Callable[..., Server],
) -> None:
    server = make_server()
    asked = {"runtime": {"import_path": "own:Box", "cpus": 8, "memory_mb": 100, "gpus": 1}}
    refresh = {"evaluator": {"strategy": "session_completed", "refresh_runtime": True}}
    assert server.submit("early", **asked).status_code == 200
    assert server.task("early")["waiting_for"] == "a gateway: none is connected"
    server.node("small", resources=Resources(cpus=2, memory_mb=100)).poll()
    server.node("big", resources=Resources(cpus=4, memory_mb=150), labels={"zone": "x"}).poll()
    assert server.task("early")["waiting_for"].startswith("a gateway with 8 CPUs, 100 MiB of memory, 1 GPU: ")
    assert problems(server.submit("late", **asked)) == {
        "body.runtime.cpus": "a session needs 8 CPUs; the biggest gateway, big, has 4 CPUs",
        "body.runtime.gpus": "a session needs 1 GPU; the biggest gateway, small, has none",
    }
    assert problems(server.submit("fresh", runtime={"memory_mb": 100}, **refresh)) == {
        "body.runtime.memory_mb": "a session with its fresh evaluation sandbox needs 200 MiB of memory; "
        "the biggest gateway, big, has 150 MiB of memory"
    }
    assert problems(server.submit("there", node_labels={"zone": "y"})) == {
        "body.node_labels": "no gateway has the labels zone=y: zone is x"
    }
    assert problems(server.submit("there", node_labels={"zone": "x"}, runtime={"cpus": 5})).keys() == {
        "body.runtime.cpus"
    }
    assert server.submit("there", node_labels={"zone": "x"}, runtime={"cpus": 4}).status_code == 200


def test_task_that_needs_only_room_says_how_much_is_missing(server: Server) -> None:
    node = server.node("roomy", resources=Resources(cpus=2))
    node.poll()
    server.submit("first", runtime={"cpus": 2})
    (lease,) = node.lease()
    server.submit("second", runtime={"cpus": 1.5})
    assert server.task("second")["waiting_for"] == "room for 1.5 CPUs: roomy has nothing free of 2 CPUs"
    shown = server.http.get("/nodes/roomy").json()
    assert (shown["resources"]["cpus"], shown["reserved"]["cpus"]) == (2, 2)
    node.finish(lease)
    assert server.task("second")["waiting_for"] is None
    assert len(node.lease()) == 1


def test_reservations_and_labels_outlive_the_server(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node(resources=Resources(cpus=2), labels={"zone": "x"})
    node.poll()
    server.submit("group", num_samples=3, runtime={"cpus": 1}, node_labels={"zone": "x"})
    leases = node.lease(2)
    server.restart()
    node.poll()
    assert server.http.get("/nodes/node-a").json()["reserved"]["cpus"] == 2
    assert server.task("group")["waiting_for"].startswith("room for 1 CPU")
    node.finish(leases[0])
    assert len(node.lease()) == 1
    assert server.http.get("/nodes/node-a").json()["reserved"]["cpus"] == 2


def test_pause_outlives_the_server_and_reaches_the_node_that_joins(make_server: Callable[..., Server]) -> None:
    server = make_server()
    assert server.http.post("/rollout/inference/pause", params={"timeout_seconds": 600}).json()["paused"]
    server.restart()
    status = server.http.get("/rollout/inference/status").json()
    assert status["paused"]
    assert 500 < status["seconds_left"] <= 600
    node = server.node()
    (order,) = node.poll().orders
    assert order.kind == "pause"
    assert 500 < order.timeout_seconds <= 600
    assert server.http.get("/rollout/inference/status").json()["waiting_for"] == ["node-a"]
    node.acked = [order.id]
    assert node.poll().orders == []
    server.http.post("/rollout/inference/resume")
    assert [order.kind for order in node.poll().orders] == ["resume"]


def test_pause_ends_by_itself_and_stops_the_queue_clock_meanwhile(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.submit("patient", budgets={"queue": 2.0})
    server.http.post("/rollout/inference/pause", params={"timeout_seconds": 4})
    paused_at = time.monotonic()
    eventually(lambda: not server.http.get("/rollout/inference/status").json()["paused"])
    assert server.task("patient")["status"] == "running"
    assert time.monotonic() - paused_at > 3.5
    assert eventually(lambda: server.task("patient")["status"] == "failed")
