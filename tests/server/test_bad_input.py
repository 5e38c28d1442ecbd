"""What is wrong with a task is said at once, with the field's path, and nothing is kept of it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.server.conftest import Server, task

BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"num_samples": 0}, "num_samples", "greater than or equal to 1"),
    ({"timeout_seconds": 0}, "timeout_seconds", "greater than 0"),
    ({"timeout_seconds": -1}, "timeout_seconds", "greater than 0"),
    ({"timeout_seconds": float("nan")}, "timeout_seconds", "finite"),
    ({"timeout_seconds": float("inf")}, "timeout_seconds", "finite"),
    ({"timeout_seconds": "abc"}, "timeout_seconds", "valid number"),
    ({"sampling": {"temperature": float("nan")}}, "sampling.temperature", "finite"),
    ({"sampling": {"repetition_penalty": float("nan")}}, "sampling.repetition_penalty", "finite"),
    ({"metadata": {"a": [1, {"b": float("-inf")}]}}, "metadata.a.1.b", "finite"),
    ({"instruction": ""}, "", "instruction is empty"),
    ({"task_id": "a/b"}, "task_id", "slashes"),
    ({"dispatch_priority": 101}, "dispatch_priority", "less than or equal to 100"),
    ({"early_stop_min_usable_sessions": 2}, "", "at most num_samples"),
    ({"agent": {}}, "agent", "exactly one of harness and import_path"),
    ({"agent": {"harness": "nonesuch"}}, "agent.harness", "unknown harness 'nonesuch'"),
    ({"runtime": {"backend": "nonesuch"}}, "runtime.backend", "unknown runtime 'nonesuch'"),
    ({"builder": {"strategy": "nonesuch"}}, "builder.strategy", "unknown builder 'nonesuch'"),
    ({"evaluator": {"strategy": "nonesuch"}}, "evaluator.strategy", "unknown evaluator 'nonesuch'"),
    ({"callback_url": "not a url"}, "callback_url", "http or https URL"),
]


@pytest.mark.parametrize(("fields", "path", "words"), BAD)
def test_bad_task_is_refused_by_name(server: Server, fields: dict[str, Any], path: str, words: str) -> None:
    server.node().poll()
    body = task("bad") | fields
    answer = server.http.post(
        "/rollout/task/submit", content=json.dumps(body), headers={"Content-Type": "application/json"}
    )
    assert answer.status_code == 422
    mistakes = {".".join(map(str, item["loc"][1:])): item["msg"] for item in answer.json()["detail"]}
    assert words in mistakes[path]
    assert server.http.get("/rollout/task/bad").status_code == 404


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"null", b'{"task_id": 1}', b"\xff\xfe"])
def test_body_that_is_no_task_is_refused(server: Server, content: bytes) -> None:
    answer = server.http.post("/rollout/task/submit", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code in (400, 422)
    assert answer.json()["detail"]


@pytest.mark.parametrize("path", ["/tasks?limit=0", "/tasks?limit=1001", "/tasks?since=nan", "/tasks?status=odd"])
def test_bad_query_is_refused(server: Server, path: str) -> None:
    assert server.http.get(path).status_code == 422


@pytest.mark.parametrize("path", ["/node/poll", "/node/work", "/node/sessions/a/1/result"])
def test_body_that_is_no_node_message_is_refused(server: Server, path: str) -> None:
    answer = server.http.post(path, content=b"\x81\xa1a\x01")
    assert answer.status_code == 422
    assert "not a" in answer.json()["detail"]


def test_unknown_fields_are_named_and_ignored(server: Server) -> None:
    answer = server.submit("old-client", prioritee=3, runtime={"gpu_kind": "x"})
    assert answer.status_code == 200
    assert answer.headers["X-Polar-Ignored"] == "prioritee, runtime.gpu_kind"


def test_long_instruction_arrives_whole(server: Server) -> None:
    node = server.node()
    text = "läng " * 200_000
    assert server.submit("long", instruction=text).status_code == 200
    (lease,) = node.lease()
    assert lease.task["instruction"] == text


def test_ids_that_are_odd_but_allowed_work(server: Server) -> None:
    node = server.node()
    for name in ("ü b%2e?#&", ".hidden", "x" * 200, "漢" * 200):
        assert server.submit(name).status_code == 200
        (lease,) = node.lease()
        node.finish(lease)
        rows = server.http.get("/tasks", params={"status": "completed"}).json()["tasks"]
        assert name in [row["task_id"] for row in rows]


def test_names_are_waited_for_while_no_gateway_is_there(make_server: Any) -> None:
    server = make_server()
    assert server.submit("ahead", agent={"harness": "codex"}).status_code == 200
    server.node().poll()
    assert "a gateway with the harness 'codex': node-a has" in server.task("ahead")["waiting_for"]
