"""Who may call: open on loopback alone, and not while agents could reach the server; node routes never."""

from __future__ import annotations

import http.client
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from tests.peers.node import Node
from tests.server.conftest import TOKEN, Server, task

from polar.config import TOKEN_HEADER, TOKEN_VARIABLE


def get(server: Server, path: str = "/rollout/status", **headers: str) -> httpx.Response:
    return httpx.get(server.url + path, headers=headers, trust_env=False)


def test_loopback_is_open_to_trainers_but_not_to_web_pages(server: Server) -> None:
    assert get(server).status_code == 200
    assert get(server, Origin="http://evil.example").status_code == 403
    assert httpx.post(server.url + "/node/poll", trust_env=False).status_code == 401


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
    connection = http.client.HTTPConnection("127.0.0.1", int(server.url.rsplit(":", 1)[1]), timeout=20)
    connection.putrequest("POST", "/rollout/task/submit")
    connection.putheader("Content-Type", "application/json")
    connection.putheader("Content-Length", str(1 << 30))
    connection.endheaders()
    answer = connection.getresponse()
    assert answer.status == 413
    assert b"larger than" in answer.read()
    connection.close()
