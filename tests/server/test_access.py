"""Who may call: open on loopback alone, and not while agents could reach the server; node routes never."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from tests.peers.node import Node
from tests.server.conftest import TOKEN, Server, task

from polar.config import TOKEN_HEADER, TOKEN_VARIABLE


def get(server: Server, path: str = "/rollout/status", **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, trust_env=False)


def test_loopback_is_open_to_trainers_but_not_to_web_pages(server: Server) -> None:
    assert get(server).status_code == 200
    assert get(server, Origin="http://evil.example").status_code == 403
    assert httpx.post(server.url + "/node/poll", trust_env=False).status_code == 401


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1", 200),
        ("127.0.0.1:8080", 200),
        ("[::1]:8080", 200),
        ("localhost", 200),
        ("LocalHost:99", 200),
        ("polar.localhost:8080", 200),
        ("192.0.2.7:8080", 200),
        ("evil.example", 403),
        ("evil.example:8080", 403),
        ("localhost.evil.example", 403),
        ("127.0.0.1.evil.example", 403),
        ("localhost@evil.example", 403),
        ("[::1", 403),
    ],
)
def test_name_that_is_not_the_servers_own_is_refused(server: Server, host: str, status: int) -> None:
    """A web page whose own name was made to lead here may not read what it asks for."""
    for path in ("/rollout/status", "/openapi.json", "/events/none"):
        answer = get(server, path, Host=host)
        assert answer.status_code == (404 if status == 200 and path == "/events/none" else status)
    if status == 403:
        assert (
            "call it by its address, set rollout.public_url, or send X-Polar-Control-Token" in answer.json()["detail"]
        )
        assert get(server, Host=host, **{TOKEN_HEADER: TOKEN}).status_code == 200


def test_public_name_is_the_servers_own(make_server: Callable[..., Server]) -> None:
    server = make_server()
    server.kill()
    server.settings["public_url"] = "http://polar.example:9000/"
    url = server.url
    server.process = subprocess.Popen(server.command(), stdout=subprocess.PIPE, text=True)
    assert server.process.stdout is not None
    assert server.process.stdout.readline().strip() == "http://polar.example:9000/"
    for host, status in (("polar.example", 200), ("Polar.Example:9000", 200), ("other.example", 403)):
        assert httpx.get(url + "/health", headers={"Host": host}, trust_env=False).status_code == status


def test_wrong_token_is_refused_and_the_answer_says_where_the_right_one_is(server: Server) -> None:
    answer = get(server, **{TOKEN_HEADER: "wrong"})
    assert answer.status_code == 401
    assert str(server.folder / "control_token") in answer.json()["detail"]


def test_node_with_the_local_runtime_closes_the_server(make_server: Callable[..., Server]) -> None:
    server = make_server()
    Node(server.url, TOKEN, runtimes=["bubblewrap", "local"]).poll()
    assert get(server).status_code == 401
    assert get(server, **{TOKEN_HEADER: TOKEN}).status_code == 200


def test_other_binds_need_the_token(make_server: Callable[..., Server]) -> None:
    server = make_server(host="0.0.0.0")
    for path in ("/health", "/rollout/status", "/events"):
        assert get(server, path).status_code == 401
    assert server.submit().status_code == 200


def test_token_in_the_environment_closes_the_server(tmp_path: Path) -> None:
    script = Path(__file__).with_name("serve.py")
    settings = f'{{"port": 0, "save_dir": "{tmp_path}"}}'
    environment = os.environ | {TOKEN_VARIABLE: TOKEN}
    with subprocess.Popen(
        [sys.executable, str(script), settings, TOKEN], stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        try:
            assert httpx.post(url + "/rollout/task/submit", json=task(), trust_env=False).status_code == 401
        finally:
            process.kill()


def test_body_above_the_bound_is_refused_unread(server: Server) -> None:
    status, detail = server.declare("POST", "/rollout/task/submit", 300 << 20)
    assert (status, detail) == (413, "the body is larger than 67108864 bytes")
