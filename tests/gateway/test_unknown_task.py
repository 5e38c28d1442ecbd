"""A task that this gateway's version does not understand is given back by name; the gateway lives on."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from chain import until
from halves import polar_gateway, polar_server, topology
from peers.engine import ScriptedEngine
from peers.harness import scripted

BEAT = 0.5


def test_a_lease_that_is_not_understood_is_given_back(engine: ScriptedEngine, tmp_path: Path) -> None:
    """A server of a newer version would have taken it; here its row is changed by hand."""
    data = tmp_path / "server"
    with polar_server(data) as server:
        server.submit("strange", num_samples=2, **scripted(("call", "hello")))
        server.submit("plain", **scripted(("call", "hello")))
    with sqlite3.connect(data / "polar.db") as rows:
        rows.execute(
            """UPDATE tasks SET request = json_set(request, '$.reasoning', 'newer') WHERE task_id = 'strange'"""
        )
    with (
        polar_server(data) as server,
        polar_gateway(tmp_path / "gateway", server, topology(tmp_path / "topology.yaml", engine.url, BEAT)),
    ):
        until(lambda: server.status("strange")["status"] == "failed", 60)
        until(lambda: server.status("plain")["status"] == "completed", 60)
        for result in server.http.get("/rollout/task/strange").json()["results"]:
            assert result["metadata"]["termination"] == "task_unknown"
            assert result["metadata"]["group_size"] == 2
            assert "node-0 does not understand the task: reasoning:" in result["error"]
            assert result["trajectory"] is None
