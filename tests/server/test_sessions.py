"""From submit to the accepted result, as trainer and gateway see it over HTTP."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.peers.node import Node, done, fault
from tests.server.conftest import Server, eventually

from polar.codec import from_msgpack, to_msgpack
from polar.nodeapi import Held, Workers, WorkRequest
from polar.records import SessionResult, SessionStatus, Termination, TokenLedger


def test_task_runs_to_its_results(server: Server) -> None:
    node = server.node()
    assert server.submit("group", num_samples=2).json() == {"task_id": "group", "status": "running"}
    leases = node.lease(2)
    assert {lease.session_index for lease in leases} == {0, 1}
    assert len({lease.key for lease in leases}) == 2
    assert all(f"{lease.session_id}.{lease.attempt}" in lease.key for lease in leases)
    for lease in leases:
        reply = node.finish(lease, reward=float(lease.session_index))
        assert (reply.accepted, reply.winner) == (True, 1)
    task = server.task("group")
    assert (task["status"], task["completed_sessions"]) == ("completed", 2)
    assert [result["metadata"]["session_index"] for result in task["results"]] == [0, 1]
    trace = task["results"][1]["trajectory"]["traces"][0]
    assert (trace["response_ids"], trace["response_logprobs"]) == ([50, 51, 9], [-0.5, -0.25, -0.125])
    assert server.task("group", results="false")["results"] == []
    stored = [from_msgpack(Path(path).read_bytes(), SessionResult) for path in task["result_paths"]]
    assert [result.session_id for result in stored] == [result["session_id"] for result in task["results"]]


def test_lease_goes_out_at_once_to_a_node_that_waits(server: Server) -> None:
    node = server.node()
    node.poll()
    got: list[float] = []
    waiting = threading.Thread(target=lambda: (node.work(), got.append(time.monotonic())))
    waiting.start()
    eventually(lambda: server.http.get("/nodes/node-a").json()["healthy"])
    submitted = time.monotonic()
    server.submit("quick")
    waiting.join(20)
    assert got
    assert got[0] - submitted < 10


def test_retried_submit_is_one_task_and_another_body_is_refused(server: Server) -> None:
    first = server.submit("same", metadata={"a": 1, "b": [2]})
    again = server.http.post(
        "/rollout/task/submit",
        content=b'{"agent": {"custom_shell": {"command": "true"}, "harness": "shell"}, "instruction": "say hello",'
        b' "metadata": {"b": [2], "a": 1}, "task_id": "same", "callback_url": "http://127.0.0.1:9/x"}',
        headers={"Content-Type": "application/json"},
    )
    assert first.json() == again.json()
    other = server.submit("same", num_samples=3)
    assert other.status_code == 409
    assert "same" in other.json()["detail"]
    assert server.task("same")["total_sessions"] == 1


def test_unknown_task_is_not_found(server: Server) -> None:
    for method, path in (
        ("GET", "/rollout/task/none"),
        ("DELETE", "/rollout/task/none"),
        ("GET", "/tasks/none/sessions"),
    ):
        answer = server.http.request(method, path)
        assert (answer.status_code, answer.json()) == (404, {"detail": "Task not found"})


def test_cancel_before_submit_is_remembered(server: Server) -> None:
    gone = server.http.delete("/rollout/task/early", params={"register_if_missing": "true"}).json()
    assert (gone["task_id"], gone["status"]) == ("early", "cancelled")
    assert server.submit("early").status_code == 409


def test_cancel_reaches_waiting_and_running_sessions(server: Server) -> None:
    node = server.node()
    server.submit("stop", num_samples=2)
    (lease,) = node.lease()
    replies: list[object] = []
    asking = threading.Thread(target=lambda: replies.append(node.work(0).cancels))
    asking.start()
    status = server.http.delete("/rollout/task/stop").json()
    assert (status["status"], status["completed_sessions"]) == ("cancelling", 1)
    asking.join(20)
    (cancel,) = replies[0]  # type: ignore[misc]
    assert (cancel.session_id, cancel.attempt, cancel.why) == (lease.session_id, 1, "cancelled")
    node.held = [Held(session_id=lease.session_id, attempt=1, stage=SessionStatus.RUNNING)]
    assert [cancel.why for cancel in node.poll().cancels] == ["cancelled"]
    ended = done(lease, node, status=SessionStatus.ERROR, termination=Termination.CANCELLED, log_sha256=None)
    assert node.result(ended).accepted
    task = server.task("stop")
    assert task["status"] == "cancelled"
    assert {result["metadata"]["termination"] for result in task["results"]} == {"cancelled"}


def test_infrastructure_fault_is_another_attempt_and_its_tokens_are_counted(server: Server) -> None:
    node = server.node()
    server.submit("retry")
    (first,) = node.lease()
    reply = node.result(fault(first, node, tokens=TokenLedger(sampled=11)))
    assert (reply.accepted, reply.winner) == (False, None)
    assert server.task("retry")["status"] == "running"
    (second,) = node.lease()
    assert (second.session_id, second.attempt) == (first.session_id, 2)
    assert second.key != first.key
    node.finish(second)
    result = server.task("retry")["results"][0]
    assert result["metadata"]["attempt"] == 2
    assert result["trajectory"]["metadata"]["tokens"]["attempt_discarded"] == 11


def test_task_without_any_trajectory_has_failed(server: Server) -> None:
    node = server.node()
    server.submit("hopeless", max_attempts=1)
    node.result(fault(node.lease()[0], node))
    task = server.task("hopeless")
    assert task["status"] == "failed"
    assert "sandbox_start" in task["error"]
    assert task["results"][0]["metadata"]["fault"] == "sandbox_start"


def test_queue_budget_ends_a_task_that_nobody_takes(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.submit("patient", budgets={"queue": 0.2})
    assert server.task("patient")["waiting_for"] == "a gateway: none is connected"
    task = eventually(lambda: (found := server.task("patient"))["status"] == "failed" and found)
    assert task["results"][0]["status"] == "TIMEOUT"
    assert task["results"][0]["metadata"] == {"session_index": 0, "group_size": 1, "termination": "queue"}


def test_log_upload_goes_on_after_a_cut(server: Server) -> None:
    node = server.node()
    server.submit("upload")
    (lease,) = node.lease()
    data = bytes(range(256)) * 1000
    assert node.upload(lease, data[:1000]).size == 1000
    assert node.upload(lease, data[5000:], offset=5000).size == 1000
    assert node.upload(lease, data[500:], offset=500).size == len(data)
    node.result(done(lease, node, log_sha256=hashlib.sha256(data).hexdigest()))
    path = f"/tasks/upload/sessions/{lease.session_id}/log"
    assert server.http.get(path).content == data
    assert node.upload(lease, data[:10]).size == len(data)
    assert server.http.get(path, params={"attempt": 2}).status_code == 404


def test_result_is_taken_only_with_its_log(server: Server) -> None:
    node = server.node()
    server.submit("pair")
    (lease,) = node.lease()
    node.upload(lease, b"another log")
    with pytest.raises(httpx.HTTPStatusError, match="503"):
        node.result(done(lease, node, log_sha256=hashlib.sha256(b"the log").hexdigest()))
    assert server.task("pair")["completed_sessions"] == 0
    assert node.upload(lease, b"the log").size == len(b"the log")
    assert node.result(done(lease, node, log_sha256=hashlib.sha256(b"the log").hexdigest())).accepted


def test_result_of_an_attempt_never_leased_is_refused(server: Server) -> None:
    node = server.node()
    server.submit("fence")
    (lease,) = node.lease()
    lease.attempt = 2
    for call in (lambda: node.finish(lease), lambda: node.result(done(lease, node))):
        with pytest.raises(httpx.HTTPStatusError, match="404"):
            call()


def test_older_gateway_of_the_same_name_is_refused(server: Server) -> None:
    old, new = server.node("twin"), server.node("twin", epoch=2)
    old.poll()
    new.poll()
    for call in (old.poll, old.work):
        with pytest.raises(httpx.HTTPStatusError, match="409"):
            call()


def test_unhealthy_engine_gets_nothing_and_the_task_says_why(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    node.engine.healthy, node.engine.problem = False, "no answer at http://127.0.0.1:30000"
    node.poll()
    server.submit("waits")
    with httpx.Client(base_url=server.url, headers=node.http.headers, timeout=0.5) as impatient:
        asked = WorkRequest(node_id="node-a", epoch=1, room=Workers(init=1, run=1, postrun=1))
        with pytest.raises(httpx.ReadTimeout):
            impatient.post("/node/work", content=to_msgpack(asked))
    assert server.task("waits")["waiting_for"] == "a healthy engine: node-a: no answer at http://127.0.0.1:30000"
    node.engine.healthy = True
    (lease,) = node.lease()
    assert lease.attempt == 1


def test_pause_is_acknowledged_by_every_gateway(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    node.poll()
    answers: list[httpx.Response] = []
    pausing = threading.Thread(target=lambda: answers.append(server.http.post("/rollout/inference/pause")))
    pausing.start()
    orders = eventually(lambda: node.work(0).orders)
    assert [order.kind for order in orders] == ["pause"]
    assert server.http.get("/rollout/inference/status").json()["waiting_for"] == ["node-a"]
    node.acked = [orders[0].id]
    node.poll()
    pausing.join(20)
    assert answers[0].json()["paused"]
    server.http.post("/rollout/inference/resume")
    assert [order.kind for order in node.poll().orders] == ["resume"]
    assert not server.http.get("/rollout/inference/status").json()["paused"]


def test_pause_waits_for_a_silent_gateway_as_long_as_it_holds_a_lease(make_server: Callable[..., Server]) -> None:
    server = make_server(lease_seconds=4.0)
    server.node("gone", heartbeat_interval_seconds=0.1).poll()
    node = server.node("cut-off", heartbeat_interval_seconds=0.1)
    server.submit("task")
    assert node.lease()
    eventually(lambda: not any(each["healthy"] for each in server.http.get("/nodes").json()["nodes"]))
    answer = server.http.post("/rollout/inference/pause", params={"timeout_seconds": 0.3})
    assert answer.status_code == 504
    assert "paused within 0.3 s: cut-off did not; all go on again" in answer.json()["detail"]
    assert server.http.post("/rollout/inference/pause", params={"timeout_seconds": 60}).json()["paused"]


def test_pause_that_is_not_acknowledged_is_taken_back(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node: Node = server.node()
    node.poll()
    answer = server.http.post("/rollout/inference/pause", params={"timeout_seconds": 0.3})
    assert answer.status_code == 504
    assert [order.kind for order in node.poll().orders] == ["resume"]
