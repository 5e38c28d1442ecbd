"""The gateways' routes take any bytes: what is no message of theirs is refused by name, and the server goes on, also
after a restart from what it has saved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.peers.node import Node, done, fault
from tests.server.conftest import Server, eventually

from polar.codec import from_msgpack, to_msgpack
from polar.nodeapi import Held, Lease, NodeResult, Workers, WorkRequest
from polar.records import SessionStatus, Trace

EXAMPLES = 60
Path = list[str | int]

ODD: list[Any] = [
    None,
    True,
    "",
    "x" * 100_000,
    "\0",
    b"\xff",
    -1,
    2**63 - 1,
    2**63,
    2**64 - 1,
    0.5,
    float("nan"),
    float("inf"),
    float("-inf"),
    1e308,
    [],
    [[]] * 3,
    {},
    {"a": {"b": [1]}},
    {1: 2},
    msgspec.msgpack.Ext(1, b"\1\2\3"),
    msgspec.msgpack.Ext(2, b"\0\0\xc0\x7f"),
    msgspec.msgpack.Ext(3, b"\7" * 9),
    msgspec.msgpack.Ext(99, b""),
]


def deep(levels: int) -> Any:
    return msgspec.Raw(b"\x91" * levels + b"\x01")


def places(value: Any, path: Path) -> Iterator[Path]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, [*path, key])


def replaced(value: Any, path: Path, odd: Any) -> Any:
    if not path:
        return odd
    copy = dict(value) if isinstance(value, dict) else list(value)
    copy[path[0]] = replaced(value[path[0]], path[1:], odd)
    return copy


@st.composite
def mutations(draw: st.DrawFn) -> Callable[[bytes], bytes]:
    """Of a message: one place with another value, unknown fields beside the known, or its bytes cut or changed."""
    kind = draw(st.sampled_from(["value", "value", "value", "deep", "unknown", "cut", "byte"]))
    where, odd = draw(st.integers(0, 10_000)), draw(st.sampled_from(ODD))

    def mutate(message: bytes) -> bytes:
        if kind == "cut":
            return message[: where % len(message)]
        if kind == "byte":
            at = where % len(message)
            return message[:at] + bytes([where % 256]) + message[at + 1 :]
        document = msgspec.msgpack.decode(message)
        if kind == "unknown":
            return msgspec.msgpack.encode(document | {"surprise": odd})
        paths = list(places(document, []))
        value = deep(where) if kind == "deep" else odd
        return msgspec.msgpack.encode(replaced(document, paths[where % len(paths)], value))

    return mutate


def check(answer: httpx.Response, *, also: tuple[int, ...] = ()) -> None:
    assert answer.status_code in (200, 404, 409, 422, *also), answer.text
    if answer.status_code != 200:
        assert answer.json()["detail"]


def goes_on(server: Server) -> None:
    server.restart()
    node = server.node("after")
    server.submit("after", dispatch_priority=100)
    assert node.finish(node.lease()[0]).accepted
    assert eventually(lambda: server.http.get("/nodes").status_code == 200)


def test_polls_of_any_bytes(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.node("kept").poll()
    node = server.node("odd")
    node.held = [Held(session_id="none", attempt=1, stage=SessionStatus.RUNNING)]
    report = to_msgpack(node.report())

    @settings(max_examples=EXAMPLES)
    @given(mutations())
    def poll(mutate: Callable[[bytes], bytes]) -> None:
        check(node.http.post("/node/poll", content=mutate(report)))

    poll()
    assert server.node("kept").poll().epoch == 1
    goes_on(server)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epoch", 2**63),
        ("epoch", -1),
        ("heartbeat_interval_seconds", float("nan")),
        ("heartbeat_interval_seconds", 0.0),
        ("room", {"init": 2**64 - 1, "run": 1, "postrun": 1}),
        ("resources", {"cpus": float("nan")}),
        ("labels", {"a": 1}),
    ],
)
def test_numbers_that_no_store_can_hold_are_refused_by_name(server: Server, field: str, value: Any) -> None:
    node = server.node("numbers")
    document = msgspec.msgpack.decode(to_msgpack(node.report())) | {field: value}
    answer = node.http.post("/node/poll", content=msgspec.msgpack.encode(document))
    assert answer.status_code == 422
    assert f"`$.{field}" in answer.json()["detail"]
    assert node.poll().epoch == 1


def test_requests_for_work_of_any_bytes(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    node.poll()
    asked = to_msgpack(WorkRequest(node_id="node-a", epoch=1, room=Workers(init=0, run=0, postrun=0)))

    @settings(max_examples=EXAMPLES)
    @given(mutations())
    def work(mutate: Callable[[bytes], bytes]) -> None:
        try:
            check(node.http.post("/node/work", content=mutate(asked), timeout=0.2), also=(503,))
        except httpx.ReadTimeout:
            return  # a request that is good is held open

    work()
    goes_on(server)


def test_results_of_any_bytes(make_server: Callable[..., Server]) -> None:
    server = make_server()
    node = server.node()
    server.submit("fuzzed", num_samples=EXAMPLES + 1)
    leases = node.lease(EXAMPLES + 1)

    @settings(max_examples=EXAMPLES)
    @given(mutations())
    def result(mutate: Callable[[bytes], bytes]) -> None:
        lease = leases.pop()
        message = mutate(to_msgpack(done(lease, node, log_sha256=None, traces=whole(lease, node).traces)))
        check(node.http.post(f"/node/sessions/{lease.session_id}/1/result", content=message))

    result()
    for media in ("application/json", "application/msgpack"):
        assert server.http.get("/rollout/task/fuzzed", headers={"Accept": media}).status_code == 200
    assert server.http.get("/tasks/fuzzed/sessions").status_code == 200
    goes_on(server)


def whole(lease: Lease, node: Node) -> NodeResult:
    """With every kind of field that a trace may have."""
    result = done(lease, node)
    assert result.traces is not None
    messages = [{"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    traces = [msgspec.structs.replace(trace, prompt_messages=messages, tools=messages) for trace in result.traces]
    return msgspec.structs.replace(result, traces=traces)


@pytest.mark.parametrize("attempt", ["0", "2", "-1", "x", "1" * 5000, "9" * 18])
def test_attempt_that_is_none_is_refused(server: Server, attempt: str) -> None:
    node = server.node()
    server.submit(f"attempt-{attempt[:3]}-{len(attempt)}")
    (lease,) = node.lease()
    for method, route in (("PUT", "log"), ("POST", "result")):
        answer = node.http.request(method, f"/node/sessions/{lease.session_id}/{attempt}/{route}", content=b"\x80")
        check(answer)
        assert answer.status_code != 200
    assert node.finish(lease).accepted


@pytest.mark.parametrize("offset", ["-1", "x", "", "1.5", "٣", "1" * 5000])
def test_offset_that_is_no_number_is_refused(server: Server, offset: str) -> None:
    node = server.node()
    server.submit(f"offset-{offset[:3]}-{len(offset)}")
    (lease,) = node.lease()
    path = f"/node/sessions/{lease.session_id}/1/log"
    answer = node.http.put(path, params={"offset": offset}, content=b"log")
    assert answer.status_code == 422
    assert "offset must be a whole number" in answer.json()["detail"]
    assert node.finish(lease).accepted


def test_offset_beyond_what_stands_is_told_what_stands(server: Server) -> None:
    node = server.node()
    server.submit("beyond")
    (lease,) = node.lease()
    assert node.upload(lease, b"abc", offset=10**15).size == 0
    assert node.upload(lease, b"abc").size == 3
    assert node.upload(lease, b"def", offset=10**15).size == 3


def test_log_and_result_of_too_many_bytes_are_refused_unread(server: Server) -> None:
    node = server.node()
    server.submit("large")
    (lease,) = node.lease()
    path = f"/node/sessions/{lease.session_id}/1"
    for method, route, size in (("PUT", "log", 9 << 30), ("POST", "result", 300 << 20)):
        status, detail = server.declare(method, f"{path}/{route}", size)
        assert status == 413
        assert "larger than" in detail
    assert node.upload(lease, b"log").size == 3
    assert node.finish(lease).accepted


def test_result_whose_log_has_another_hash_is_asked_for_its_log_anew(server: Server) -> None:
    node = server.node()
    server.submit("hash")
    (lease,) = node.lease()
    result = done(lease, node, log_sha256=hashlib.sha256(b"what was meant").hexdigest())
    node.upload(lease, b"not what was meant")
    with pytest.raises(httpx.HTTPStatusError, match="503") as refused:
        node.result(result)
    assert "send it again from offset 0" in refused.value.response.json()["detail"]
    assert node.upload(lease, b"what was meant").size == len(b"what was meant")
    assert node.result(result).accepted


def test_result_that_is_not_over_or_of_another_attempt_is_refused(server: Server) -> None:
    node = server.node()
    server.submit("wrong")
    (lease,) = node.lease()
    path = f"/node/sessions/{lease.session_id}/1/result"
    for change, words in (
        ({"status": SessionStatus.RUNNING}, "cannot have the status RUNNING"),
        ({"attempt": 2}, "another session or attempt than the path"),
    ):
        answer = node.http.post(path, content=to_msgpack(fault(lease, node, **change)))
        assert answer.status_code == 422
        assert words in answer.json()["detail"]


def test_fields_of_a_newer_gateway_are_passed_over(server: Server) -> None:
    node = server.node("newer")
    document = msgspec.msgpack.decode(to_msgpack(node.report())) | {"gpu_model": "x", "metrics": {"later": 1}}
    assert node.http.post("/node/poll", content=msgspec.msgpack.encode(document)).status_code == 200


def test_metadata_with_keys_that_json_has_not_is_readable_as_json(server: Server) -> None:
    node = server.node()
    server.submit("keys")
    (lease,) = node.lease()
    document = msgspec.msgpack.decode(to_msgpack(done(lease, node, log_sha256=None)))
    document["evaluation"]["metadata"] = {"by_case": {None: 1, True: 0.5, 3: "x"}}
    path = f"/node/sessions/{lease.session_id}/1/result"
    assert node.http.post(path, content=msgspec.msgpack.encode(document)).status_code == 200
    (result,) = server.task("keys")["results"]
    assert result["trajectory"]["metadata"]["evaluation"]["by_case"] == {"None": 1, "True": 0.5, "3": "x"}


def test_codec_refuses_what_no_record_can_hold() -> None:
    for odd in (
        [2**40],
        [0.5],
        [float("nan")],
        msgspec.msgpack.Ext(1, b"\1\2\3"),
        msgspec.msgpack.Ext(7, b""),
        deep(2000),
        [["a"]],
    ):
        trace = {"prompt_ids": odd, "response_ids": [], "loss_mask": []}
        with pytest.raises(msgspec.MsgspecError):
            from_msgpack(msgspec.msgpack.encode(trace), Trace)
