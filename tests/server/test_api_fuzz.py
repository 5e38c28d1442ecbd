"""The API against its own description: a real server answers whatever the description lets a client send, and what it
forbids, as the description says, and goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.server.conftest import TOKEN, Server

from polar.config import TOKEN_HEADER

HERE = Path(__file__).parent


def fuzz(server: Server, *options: str) -> None:
    """Fails with what schemathesis found, and how to repeat it."""
    run = [sys.executable, "-m", "schemathesis.cli", "--config-file", str(HERE / "fuzzing.toml"), "run"]
    fixed = ["--seed", "1", "--generation-deterministic", "--no-color", "--request-timeout", "60"]
    environment = os.environ | {
        "SCHEMATHESIS_HOOKS": "tests.server.fuzzing",
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run(
        [*run, f"{server.url}/openapi.json", *fixed, *options], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def goes_on(server: Server) -> None:
    """What was accepted can be saved, leased and read back at a start."""
    server.restart()
    node = server.node("after")
    assert server.submit("after").status_code == 200
    assert node.finish(node.lease()[0]).accepted


def with_a_finished_task(server: Server) -> Server:
    """And a gateway that is away, so that nothing waits for it."""
    node = server.node(heartbeat_interval_seconds=0.01)
    server.submit("done", num_samples=2)
    for lease in node.lease(2):
        node.finish(lease)
    return server


def test_every_route_keeps_to_the_description(make_server: Callable[..., Server]) -> None:
    server = with_a_finished_task(make_server())
    fuzz(server, "--phases", "fuzzing,stateful", "--max-examples", "3")
    goes_on(server)


def test_closed_server_refuses_who_has_no_token_and_speaks_msgpack_to_who_has(
    make_server: Callable[..., Server],
) -> None:
    server = with_a_finished_task(make_server(host="0.0.0.0"))
    headers = ("-H", f"{TOKEN_HEADER}: {TOKEN}", "-H", "Accept: application/msgpack")
    fuzz(server, *headers, "--phases", "fuzzing", "--max-examples", "4")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_route_keeps_to_the_description_for_long(make_server: Callable[..., Server]) -> None:
    server = with_a_finished_task(make_server())
    fuzz(server, "--phases", "coverage,fuzzing,stateful", "--max-examples", "200")
    goes_on(server)
