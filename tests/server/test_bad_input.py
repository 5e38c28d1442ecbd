"""What is wrong with a task is said at once, with the field's path and what to do, and nothing is kept of it."""

from __future__ import annotations

import gzip
import http.client
import json
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.server.conftest import TOKEN, Server, task

from polar.codec import to_msgpack
from polar.config import TOKEN_HEADER

SHELL = {"harness": "shell", "custom_shell": {"command": "true"}}
UPLOAD = {"type": "upload_dir", "source": "/data", "target": "/session/data"}
BAD: list[tuple[dict[str, Any], str, str]] = [
    ({"num_samples": 0}, "num_samples", "greater than or equal to 1"),
    ({"num_samples": 10_001}, "num_samples", "less than or equal to 10000"),
    ({"max_attempts": 2**62}, "max_attempts", "less than or equal to 100"),
    ({"timeout_seconds": 0}, "timeout_seconds", "greater than 0"),
    ({"timeout_seconds": -1}, "timeout_seconds", "greater than 0"),
    ({"timeout_seconds": "abc"}, "timeout_seconds", "valid number"),
    ({"instruction": ""}, "", "instruction is empty"),
    ({"instruction": ["a"]}, "instruction", "valid string"),
    ({"instruction": None}, "instruction", "valid string"),
    ({"task_id": ""}, "task_id", "1 to 200 characters"),
    ({"task_id": "a/b"}, "task_id", "slashes"),
    ({"task_id": ".."}, "task_id", "slashes"),
    ({"task_id": "..\\.."}, "task_id", "slashes"),
    ({"task_id": "a\0b"}, "task_id", "NUL"),
    ({"task_id": "x" * 1_000_000}, "task_id", "1 to 200 characters"),
    ({"task_id": 7}, "task_id", "valid string"),
    ({"instruction": "\ud800"}, "", "half of a surrogate pair"),
    ({"metadata": {"\udfff": 1}}, "", "half of a surrogate pair"),
    ({"metadata": [1]}, "metadata", "valid dictionary"),
    ({"metadata": {"n": 10**30}}, "metadata.n", "64 bits"),
    ({"metadata": {"n": -(2**63) - 1}}, "metadata.n", "64 bits"),
    ({"dispatch_priority": 101}, "dispatch_priority", "less than or equal to 100"),
    ({"early_stop_min_usable_sessions": 2}, "", "at most num_samples"),
    ({"agent": {}}, "agent", "exactly one of harness and import_path"),
    ({"agent": {"harness": ""}}, "agent", "exactly one of harness and import_path"),
    ({"agent": {"import_path": ""}}, "agent", "exactly one of harness and import_path"),
    ({"agent": {"import_path": "no colon"}}, "agent.import_path", "must be like package.module:Class"),
    ({"runtime": {"import_path": "a:"}}, "runtime.import_path", "must be like package.module:Class"),
    ({"agent": {"harness": "nonesuch"}}, "agent.harness", "unknown harness 'nonesuch'"),
    ({"agent": {"harness": "x" * 1_000_000}}, "agent.harness", "unknown harness 'xxx"),
    ({"agent": {"harness": "shell", "custom_shell": {"command": "a\0"}}}, "agent.custom_shell.command", "NUL"),
    ({"agent": {"harness": "shell", "custom_shell": {"command": "a"}, "env": {"A=": ""}}}, "agent.env", "without ="),
    ({"agent": {"harness": "x", "env": {"A" * 1_000_000: 1}}}, f"agent.env.{'A' * 200}", "valid string"),
    ({"agent": {"harness": "a:B"}}, "agent.harness", "unknown harness 'a:B'"),
    ({"agent": {"harness": "x", "custom_shell": {"command": "a"}}}, "agent", "'shell' only, not with 'x'"),
    ({"agent": {"harness": "shell", "custom_shell": {"command": "a", "cwd": "a\0"}}}, "agent.custom_shell.cwd", "NUL"),
    ({"agent": SHELL | {"import_path": ""}}, "agent.import_path", "must be like package.module:Class"),
    ({"runtime": {"import_path": ""}}, "runtime.import_path", "must be like package.module:Class"),
    ({"builder": {"strategy": "a b:c"}}, "builder.strategy", "must be like package.module:Class"),
    ({"evaluator": {"strategy": ":b"}}, "evaluator.strategy", "must be like package.module:Class"),
    ({"runtime": {"storage_mb": 10**18}}, "runtime.storage_mb", "less than or equal to"),
    ({"runtime": {"cpus": 1e18}}, "runtime.cpus", "less than or equal to 1000000"),
    ({"runtime": {"workdir": "here"}}, "runtime.workdir", "not an absolute path"),
    ({"runtime": {"prepare": [UPLOAD | {"source": ""}]}}, "runtime.prepare.0", "one of source or content"),
    ({"runtime": {"prepare": [UPLOAD | {"target": "a\0"}]}}, "runtime.prepare.0.target", "NUL"),
    ({"runtime": {"prepare": [UPLOAD | {"target": "/y" * 3000}]}}, "runtime.prepare.0.target", "at most 4096"),
    ({"runtime": {"backend": "nonesuch"}}, "runtime.backend", "unknown runtime 'nonesuch'"),
    ({"builder": {"strategy": "nonesuch"}}, "builder.strategy", "unknown builder 'nonesuch'"),
    ({"evaluator": {"strategy": "nonesuch"}}, "evaluator.strategy", "unknown evaluator 'nonesuch'"),
    ({"builder": {"strategy": "per_request", "config": {"x": 1}}}, "builder.config", "no settings: leave out x"),
    ({"evaluator": {"strategy": "command"}}, "evaluator.config.command", "is missing"),
    ({"evaluator": {"strategy": "session_completed", "config": {"x": 1}}}, "evaluator.config.x", "no such key"),
    (
        {"evaluator": {"strategy": "test_on_output", "config": {"expected_output_json": "[" * 100_000}}},
        "evaluator.config.expected_output_json",
        "nested too deeply",
    ),
    ({"agent": {"harness": "claude_code", "settings": {"max_turns": 0}}}, "agent.settings.max_turns", "equal to 1"),
    ({"agent": {"harness": "mini_swe_agent", "skills_path": "/x"}}, "agent.skills_path", "takes none"),
    ({"runtime": {"kwargs": {"bind": ["here"]}}}, "runtime.kwargs.bind.0", "match pattern"),
    ({"runtime": {"network": "bridge"}}, "runtime.network", "unknown network 'bridge'"),
    ({"runtime": {"backend": "local", "gpus": 1}}, "runtime.gpus", "no GPU of their own"),
    ({"runtime": {"backend": "bubblewrap", "workdir": "here"}}, "runtime.workdir", "not an absolute path"),
    ({"callback_url": "not a url"}, "callback_url", "http or https URL"),
    ({"callback_url": "file:///etc/passwd"}, "callback_url", "http or https URL"),
    ({"callback_url": "http://a b/"}, "callback_url", "http or https URL"),
    ({"callback_url": f"http://{'x' * 300}/"}, "callback_url", "http or https URL"),
    ({"callback_url": "http://["}, "callback_url", "http or https URL"),
    ({"callback_url": "http://a:99999/"}, "callback_url", "http or https URL"),
    ({"callback_url": "http://a/\r\nX: y"}, "callback_url", "http or https URL"),
]
NAN, INFINITY = float("nan"), float("inf")
NOT_FINITE: list[tuple[dict[str, Any], str]] = [
    ({"num_samples": NAN}, "num_samples"),
    ({"timeout_seconds": NAN}, "timeout_seconds"),
    ({"timeout_seconds": INFINITY}, "timeout_seconds"),
    ({"dispatch_priority": -INFINITY}, "dispatch_priority"),
    ({"max_attempts": NAN}, "max_attempts"),
    ({"budgets": {"queue": NAN}}, "budgets.queue"),
    ({"budgets": {"evaluate": INFINITY}}, "budgets.evaluate"),
    ({"limits": {"seconds": INFINITY}}, "limits.seconds"),
    ({"limits": {"cost": NAN}}, "limits.cost"),
    ({"runtime": {"cpus": NAN}}, "runtime.cpus"),
    ({"runtime": {"kwargs": {"a": NAN}}}, "runtime.kwargs.a"),
    ({"evaluator": {"strategy": "harbor", "config": {"a": [NAN]}}}, "evaluator.config.a.0"),
    ({"sampling": {"temperature": NAN}}, "sampling.temperature"),
    ({"sampling": {"repetition_penalty": NAN}}, "sampling.repetition_penalty"),
    ({"metadata": {"a": [1, {"b": -INFINITY}]}}, "metadata.a.1.b"),
    ({"unknown": {"a": NAN}}, "unknown.a"),
]


def post(server: Server, content: bytes | str | Iterator[bytes], **headers: str) -> httpx.Response:
    headers = {"Content-Type": "application/json"} | {name.replace("_", "-"): value for name, value in headers.items()}
    return server.http.post("/rollout/task/submit", content=content, headers=headers)


def mistakes(answer: httpx.Response) -> dict[str, str]:
    assert answer.status_code == 422
    return {".".join(map(str, item["loc"][1:])): item["msg"] for item in answer.json()["detail"]}


@pytest.mark.parametrize(("fields", "path", "words"), BAD, ids=lambda value: str(value)[:40])
def test_bad_task_is_refused_by_name(server: Server, fields: dict[str, Any], path: str, words: str) -> None:
    server.node().poll()
    answer = post(server, json.dumps(task("bad") | fields))
    assert words in mistakes(answer)[path]
    assert len(answer.content) < 2000, "the answer does not repeat what was sent"
    assert server.http.get("/rollout/task/bad").status_code == 404


def test_settings_of_a_users_own_plug_ins_are_left_to_the_gateway(server: Server) -> None:
    server.node().poll()
    fields = {
        "agent": {"import_path": "own:Agent", "settings": {"x": 1}},
        "runtime": {"import_path": "own:Box", "network": "bridge", "kwargs": {"x": 1}},
        "builder": {"strategy": "own:Builder", "config": {"x": 1}},
        "evaluator": {"strategy": "own:Score", "config": {"x": 1}},
    }
    assert post(server, json.dumps(task("own") | fields)).status_code == 200


@pytest.mark.parametrize(("fields", "path"), NOT_FINITE)
def test_number_that_is_not_finite_is_refused_by_name(server: Server, fields: dict[str, Any], path: str) -> None:
    assert "finite" in mistakes(post(server, json.dumps(task("bad") | fields)))[path]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not JSON at line 1, column 1"),
        (b"{", "not JSON at line 1, column 2"),
        (b"[]", "valid dictionary"),
        (b"null", "valid dictionary"),
        (b'"\\ud800"', "half of a surrogate pair"),
        (b'{"task_id": 1}', "valid string"),
        (b"\xff\xfe", "not UTF-8 at byte 0"),
        (b'{"task_id": "\xed\xa0\x80"}', "not UTF-8 at byte 13"),
        (json.dumps({"task_id": "a"}).encode("utf-16"), "not UTF-8"),
        (b'{"task_id": "a", "task_id": "b"}', "twice"),
        (b'{"metadata": {"a": {"x": 1, "x": 2}}}', "twice"),
        (b"{" + b",".join(b'"n%d": 1' % number for number in range(300_000)) + b', "n7": 1}', "twice"),
        (b'{"metadata": ' + b"[" * 65 + b"]" * 65 + b"}", "more than 64 levels"),
        (b'{"metadata": ' + b"[" * 900 + b"]" * 900 + b"}", "more than 64 levels"),
        (b"[" * 100_000 + b"]" * 100_000, "more than 64 levels"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "more than 64 levels"),
        (b'{"metadata": {"n": ' + b"1" * 5000 + b"}}", "too many digits"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_body_that_is_no_task_is_refused(server: Server, content: bytes, words: str) -> None:
    assert any(words in message for message in mistakes(post(server, content)).values())


@pytest.mark.parametrize(
    ("kind", "content"),
    [
        ("text/plain", b"{}"),
        ("application/x-www-form-urlencoded", b"task_id=a"),
        ("application/msgpack", to_msgpack(task())),
        ("multipart/form-data; boundary=x", b"--x--"),
    ],
)
def test_body_of_another_type_is_refused_by_name(server: Server, kind: str, content: bytes) -> None:
    answer = post(server, content, Content_Type=kind)
    assert answer.status_code == 415
    assert answer.json()["detail"] == f"the body is {kind.split(';')[0]!r}: send the task as application/json"


def test_compressed_body_is_refused_by_name(server: Server) -> None:
    answer = post(server, gzip.compress(json.dumps(task()).encode()), Content_Encoding="gzip")
    assert (answer.status_code, "without Content-Encoding" in answer.json()["detail"]) == (415, True)


def test_types_and_sizes_that_are_odd_but_sound_are_taken(server: Server) -> None:
    for number, kind in enumerate(("application/json; charset=utf-8", "Application/JSON", "application/x+json")):
        assert post(server, json.dumps(task(f"kind-{number}")), Content_Type=kind).status_code == 200
    body = json.dumps(task("plain"))
    request = server.http.build_request("POST", "/rollout/task/submit", content=body)
    assert "content-type" not in request.headers
    assert server.http.send(request).status_code == 200
    deep = json.dumps(task("deep"))[:-1] + ', "metadata": {"a": ' + "[" * 62 + "]" * 62 + "}}"
    assert post(server, deep).status_code == 200


def test_endless_body_is_refused_and_not_kept(server: Server) -> None:
    """300 MB in chunks, whose size was never declared."""
    connection = http.client.HTTPConnection("127.0.0.1", server.settings["port"], timeout=60)
    connection.putrequest("POST", "/rollout/task/submit")
    for name, value in ((TOKEN_HEADER, TOKEN), ("Content-Type", "application/json"), ("Transfer-Encoding", "chunked")):
        connection.putheader(name, value)
    connection.endheaders()
    for _ in range(300):
        connection.send(b"100000\r\n" + bytes(1 << 20) + b"\r\n")
    connection.send(b"0\r\n\r\n")
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())) == (413, {"detail": "the body is larger than 67108864 bytes"})
    connection.close()
    assert server.memory < 600 << 20
    assert server.submit("after-the-flood").status_code == 200


@pytest.mark.parametrize("path", ["/tasks?limit=0", "/tasks?limit=1001", "/tasks?since=nan", "/tasks?status=odd"])
def test_bad_query_is_refused(server: Server, path: str) -> None:
    assert server.http.get(path).status_code == 422


@pytest.mark.parametrize(
    "path",
    [
        "/rollout/task/..%2f..%2fetc%2fpasswd",
        "/rollout/task/%2e%2e",
        "/rollout/task/%00",
        "/rollout/task/" + "x" * 10_000,
        "/tasks/..%2f..%2fpolar.db/sessions",
        "/sessions/..%2f..%2fpolar.db",
        "/tasks/known/sessions/..%2f..%2f..%2fpolar.db/log",
        "/tasks/known/sessions/none/log?attempt=1",
        "/nodes/..%2fnone",
        "/%ff%fe",
    ],
)
def test_path_to_nothing_of_ours_is_not_found(server: Server, path: str) -> None:
    server.submit("known")
    answer = server.http.get(path)
    assert (answer.status_code, "detail" in answer.json()) == (404, True)


@pytest.mark.parametrize("attempt", ["0", "-1", "x", "1" * 400])
def test_log_of_an_attempt_that_cannot_be_is_refused(server: Server, attempt: str) -> None:
    server.submit("logless")
    session_id = server.http.get("/tasks/logless/sessions").json()["sessions"][0]["session_id"]
    answer = server.http.get(f"/tasks/logless/sessions/{session_id}/log", params={"attempt": attempt})
    assert answer.status_code in (404, 422)


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("HEAD", "/health", "GET"),
        ("OPTIONS", "/rollout/task/submit", "POST"),
        ("PUT", "/rollout/task/any", "DELETE, GET"),
        ("POST", "/nodes/any", "DELETE, GET"),
        ("POST", "/events", "GET"),
        ("GET", "/node/poll", "POST"),
        ("DELETE", "/rollout/inference/pause", "POST"),
    ],
)
def test_other_method_is_refused_and_the_right_ones_are_named(
    server: Server, method: str, path: str, allowed: str
) -> None:
    answer = server.http.request(method, path)
    assert (answer.status_code, answer.headers["Allow"]) == (405, allowed)


def test_unknown_fields_are_named_and_ignored(server: Server) -> None:
    answer = server.submit("old-client", prioritee=3, runtime={"gpu_kind": "x"})
    assert answer.status_code == 200
    assert answer.headers["X-Polar-Ignored"] == "prioritee, runtime.gpu_kind"


def test_unknown_fields_of_any_name_are_fit_for_a_header(server: Server) -> None:
    odd = {"a\r\nSet-Cookie: x": 1, "ends in a space ": 2, "ü,": 3, "": 4, "\0": 5}
    answer = server.submit("odd-names", **odd)
    assert (
        answer.headers["X-Polar-Ignored"] == "a%0D%0ASet-Cookie:%20x, ends%20in%20a%20space%20, %C3%BC%2C, (empty), %00"
    )
    assert "set-cookie" not in answer.headers
    many = server.submit("many-names", **{f"field{number}": 1 for number in range(10_000)})
    assert many.status_code == 200
    assert many.headers["X-Polar-Ignored"].endswith("...")


def test_any_names_of_fields_are_answered(server: Server) -> None:
    names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)

    @settings(max_examples=40)
    @given(st.dictionaries(names, st.none() | st.booleans() | names, max_size=5))
    def submit(fields: dict[str, Any]) -> None:
        answer = post(server, json.dumps(fields | task("named")))
        assert answer.status_code in (200, 409, 422)

    submit()


def test_long_instruction_arrives_whole(server: Server) -> None:
    node = server.node()
    text = "läng " * 200_000
    assert server.submit("long", instruction=text).status_code == 200
    (lease,) = node.lease()
    assert lease.task["instruction"] == text


def test_ids_that_are_odd_but_allowed_work(server: Server) -> None:
    node = server.node()
    for name in ("ü b%2e?#&", ".hidden", "x" * 200, "漢" * 200, "a:b", "~", "-", "\u202e"):
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


def test_group_of_ten_thousand_is_taken_stopped_and_read(make_server: Any) -> None:
    """What ends one session of a group may not look at all the others."""
    server: Server = make_server()
    node = server.node()
    assert server.submit("crowd", num_samples=10_000, early_stop_min_usable_sessions=1).status_code == 200
    began = time.monotonic()
    node.finish(node.lease()[0])
    status = server.task("crowd")
    assert time.monotonic() - began < 120, "seconds on a busy machine, where looking at all for each takes many minutes"
    assert (status["status"], status["completed_sessions"], len(status["results"])) == ("completed", 10_000, 10_000)
    assert server.http.get("/tasks").json()["tasks"][0]["errored_sessions"] == 9999
