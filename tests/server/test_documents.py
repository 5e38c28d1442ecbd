"""What the server shows: the same document in both forms, filtered and bounded as asked, and described as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from tests.server.conftest import TOKEN, Server, task

from polar.client import Client
from polar.codec import from_msgpack, to_builtins

PACKED = {"Accept": "application/msgpack"}


@pytest.fixture
def with_tasks(make_server: Callable[..., Server]) -> Server:
    server = make_server()
    node = server.node()
    server.submit("done", num_samples=2, metadata={"source": "book"})
    for lease in node.lease(2):
        node.finish(lease, reward=0.25)
    server.submit("open", agent={"harness": "mini_swe_agent", "model_name": "small"})
    return server


def both(server: Server, method: str, path: str) -> Any:
    """The JSON document; the msgpack one has the same."""
    answer = server.http.request(method, path)
    assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    packed = server.http.request(method, path, headers=PACKED)
    assert (packed.status_code, packed.headers["content-type"]) == (200, "application/msgpack")
    document = answer.json()
    assert still(to_builtins(from_msgpack(packed.content, Any))) == still(document)
    return document


def still(document: Any) -> Any:
    """Without what moves on between two answers."""
    if isinstance(document, dict):
        moving = ("last_heartbeat", "seconds_left", "free_bytes", "used_bytes")
        return {key: still(value) for key, value in document.items() if key not in moving}
    return [still(item) for item in document] if isinstance(document, list) else document


def test_every_document_is_the_same_in_json_and_msgpack(with_tasks: Server) -> None:
    server = with_tasks
    session_id = both(server, "GET", "/tasks/done/sessions")["sessions"][0]["session_id"]
    assert both(server, "GET", f"/sessions/{session_id}")["task_id"] == "done"
    assert both(server, "GET", f"/tasks/done/sessions/{session_id}")["trajectory"]["traces"][0]["reward"] == 0.25
    assert both(server, "GET", "/tasks/done/request")["metadata"] == {"source": "book"}
    assert len(both(server, "GET", "/rollout/task/done")["results"]) == 2
    assert both(server, "GET", "/rollout/task/open")["results"] == []
    assert both(server, "GET", "/rollout/task/done?results=false")["completed_sessions"] == 2
    assert both(server, "GET", "/rollout/status")["tasks"] == {"done": "completed", "open": "running"}
    assert both(server, "GET", "/nodes")["nodes"][0] == both(server, "GET", "/nodes/node-a")
    assert both(server, "GET", "/health") == {"status": "ok", "nodes": 1}
    assert both(server, "GET", "/tasks")["tasks"][1]["mean_reward"] == 0.25
    assert both(server, "GET", "/rollout/inference/status")["paused"] is False
    assert both(server, "POST", "/rollout/inference/resume")["waiting_for"] == []
    assert both(server, "DELETE", "/nodes/node-a")["draining"] is True
    assert both(server, "DELETE", "/rollout/task/open")["status"] == "cancelled"


def test_packed_group_of_any_size_is_one_document(server: Server) -> None:
    """The number of results decides how msgpack writes their list."""
    for size in (1, 15, 16, 300):
        name = f"group-of-{size}"
        server.submit(name, num_samples=size)
        server.http.delete(f"/rollout/task/{name}")
        both(server, "GET", f"/rollout/task/{name}")
        with Client(server.url, TOKEN) as client:
            assert [row.metadata["session_index"] for row in client.task(name).results] == list(range(size))


def test_cheap_look_has_no_results(with_tasks: Server) -> None:
    whole, cheap = with_tasks.task("done"), with_tasks.task("done", results="false")
    assert (cheap["results"], cheap["result_paths"]) == ([], [])
    assert len(whole["result_paths"]) == 2
    assert whole | {"results": [], "result_paths": []} == cheap


def test_tasks_are_filtered_and_the_newest_come_first(with_tasks: Server) -> None:
    def listed(**params: Any) -> list[str]:
        return [row["task_id"] for row in with_tasks.http.get("/tasks", params=params).json()["tasks"]]

    assert listed() == ["open", "done"]
    assert listed(limit=1) == ["open"]
    assert listed(status="completed") == ["done"]
    assert listed(harness="mini_swe_agent") == ["open"]
    assert listed(harness="mini_swe_agent", status="completed") == []
    (row,) = with_tasks.http.get("/tasks", params={"status": "completed"}).json()["tasks"]
    assert listed(since=row["updated_at"]) == ["open", "done"]
    assert listed(since=row["updated_at"] + 1e-3, status="completed") == []
    assert (row["model"], row["source"], row["num_samples"], row["completed_sessions"]) == ("policy", "book", 2, 2)
    assert (row["errored_sessions"], row["mean_traces"], row["mean_completions"]) == (0, 1.0, 1.0)


def test_tasks_are_bounded_without_being_asked(make_server: Callable[..., Server]) -> None:
    server = make_server()
    for number in range(201):
        server.submit(f"task-{number}")
    assert len(server.http.get("/tasks").json()["tasks"]) == 200
    assert len(server.http.get("/tasks", params={"limit": 1000}).json()["tasks"]) == 201


def test_description_names_every_route_and_holds_together(server: Server) -> None:
    document = server.http.get("/openapi.json").json()
    assert document["openapi"].startswith("3.1")
    assert set(document["paths"]) == {
        "/health",
        "/events",
        "/nodes",
        "/nodes/{node_id}",
        "/rollout/inference/pause",
        "/rollout/inference/resume",
        "/rollout/inference/status",
        "/rollout/status",
        "/rollout/task/submit",
        "/rollout/task/{task_id}",
        "/sessions/{session_id}",
        "/tasks",
        "/tasks/{task_id}/request",
        "/tasks/{task_id}/sessions",
        "/tasks/{task_id}/sessions/{session_id}",
        "/tasks/{task_id}/sessions/{session_id}/log",
    }
    schemas = document["components"]["schemas"]
    assert refs(document) <= {f"#/components/schemas/{name}" for name in schemas}
    assert {"TaskRequest", "TaskStatus", "TaskResult", "Trace", "Problem"} <= set(schemas)
    example = document["paths"]["/rollout/task/submit"]["post"]["requestBody"]["content"]["application/json"]["example"]
    assert server.http.post("/rollout/task/submit", json=example).status_code == 200
    assert set(task()) <= set(schemas["TaskRequest"]["properties"])


def refs(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(refs, value.values()))
    return set().union(*map(refs, value)) if isinstance(value, list) else set()


def test_task_submitted_from_its_own_request_is_the_same_task(with_tasks: Server) -> None:
    request = with_tasks.http.get("/tasks/done/request").json()
    assert with_tasks.http.post("/rollout/task/submit", json=request).json()["status"] == "completed"
