"""`polar serve` as a process: one owner a folder, an orderly end, and nothing of it left however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import pytest

from chain import Chain, polar_serve, until
from cli.conftest import command, environment, gone, inside, marked, polar, task_file
from embedded.real_engine import save_random_policy
from peers import harness
from peers.engine import scripted_engine
from peers.harness import scripted


def long_task(mark: str, runtime: str) -> dict:
    """A session that never ends by itself, whose processes carry `mark`; one of them has left its process group."""
    task = scripted(("daemon", 600), ("call", "hello"), ("sleep", 600), backend=runtime)
    task["agent"]["env"] = {"MARK": mark}
    if runtime == "local":
        task["runtime"] = {"backend": "local"}
        shell = task["agent"]["custom_shell"]
        shell["command"] = shell["command"].replace("/session/harness.py", str(harness.__file__))
    return task


def running(chain: Chain, task: str, mark: str, runtime: str) -> None:
    answer = chain.submit(task, num_samples=2, **long_task(mark, runtime))
    assert answer.status_code == 200, answer.text
    until(lambda: chain.stage(task) == ["RUNNING"] * 2 and len(marked(mark)) >= 4)


@pytest.mark.parametrize(
    ("runtime", "signals"),
    [
        ("bubblewrap", [signal.SIGINT]),
        ("local", [signal.SIGINT, signal.SIGINT]),
    ],
)
def test_an_orderly_end_in_the_middle_leaves_nothing(engine, tmp_path, runtime, signals):
    mark = f"mark-{os.urandom(8).hex()}"
    options = ["--runtime", runtime, "--run-workers=4"]
    with polar_serve(tmp_path / "data", engine.url, *options) as chain:
        if runtime == "local":
            chain.http.headers["X-Polar-Control-Token"] = (tmp_path / "data" / "control_token").read_text()
        running(chain, "long", mark, runtime)
        for number in signals:
            chain.process.send_signal(number)
        assert chain.process.wait(30) == (130 if signal.SIGINT in signals else 0)
    assert not marked(mark)
    assert not list((tmp_path / "data" / "gateway" / "sandboxes").iterdir())


def test_a_kill_leaves_nothing_and_the_next_start_ends_the_task(engine, tmp_path):
    mark = f"mark-{os.urandom(8).hex()}"
    data = tmp_path / "data"
    with polar_serve(data, engine.url, "--run-workers=4") as chain:
        running(chain, "long", mark, "bubblewrap")
        chain.process.kill()
        chain.process.wait()
        gone(mark)
    with polar_serve(data, engine.url, "--run-workers=4") as chain:
        until(lambda: chain.stage("long") == ["RUNNING"] * 2, 30)
        chain.http.delete("/rollout/task/long")
        until(lambda: chain.status("long")["status"] == "cancelled")
    assert not marked(mark)


def test_a_folder_and_a_port_have_one_server(engine, tmp_path):
    with polar_serve(tmp_path / "data", engine.url) as chain:
        second = polar("serve", "--engine-url", engine.url, "--data", tmp_path / "data", "--port", "0")
        assert second.returncode == 2
        assert f"pid {chain.process.pid}" in second.stderr
        port = chain.url.rsplit(":", 1)[1]
        third = polar("serve", "--engine-url", engine.url, "--data", tmp_path / "other", "--port", port)
        assert third.returncode == 2
        assert port in third.stderr
        gateway_port = chain.gateway_url.rsplit(":", 1)[1]
        words = ["--data", tmp_path / "third", "--port", "0", "--gateway-port", gateway_port]
        fourth = polar("serve", "--engine-url", engine.url, *words)
        assert fourth.returncode == 2
        assert gateway_port in fourth.stderr


@pytest.mark.parametrize("option", ["--port", "--gateway-port"])
def test_a_port_in_use_is_found_before_an_engine_is_started_or_waited_for(tmp_path, option):
    words = {"--port": "0", "--gateway-port": "0", "--data": str(tmp_path / "data")}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words[option] = str(taken.getsockname()[1])
        given = [word for pair in words.items() for word in pair]
        for engine in (["--engine-url", "http://127.0.0.1:1"], ["--engine", "embedded", "--model", str(tmp_path)]):
            done = polar("serve", *engine, *given)
            assert done.returncode == 2
            assert f"cannot listen on 127.0.0.1:{words[option]}" in done.stderr
            assert f"({option})" in done.stderr
    assert not (tmp_path / "data" / "engine.log").exists()


def test_a_gateways_port_in_use_is_found_at_once(tmp_path):
    topology = tmp_path / "topology.yaml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        nodes = [{"id": "far", "port": port, "inference": {"base_url": "http://127.0.0.1:1"}}]
        topology.write_text(json.dumps({"gateway": {"nodes": nodes}}))
        done = polar("gateway", "--topology", topology, "--data", tmp_path / "data", "--server", "http://127.0.0.1:1")
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "node far" in done.stderr


def test_what_was_under_way_when_a_server_stopped_is_interrupted(engine, tmp_path):
    data = tmp_path / "data"
    with polar_serve(data, engine.url, "--run-workers=1", "--init-workers=1") as chain:
        chain.run("past", evaluator=None, **scripted(("call", "hello")))
        chain.submit("long", num_samples=8, evaluator=None, **scripted(("call", "hello"), ("sleep", 600)))
        until(lambda: "RUNNING" in chain.stage("long"), 30)
        chain.process.kill()
        chain.process.wait()
    until(lambda: inside("status", "long", "--data", data).exit_code == 0)
    said = inside("status", "long", "--data", data).stdout
    words = [line.split()[1] for line in said.splitlines() if line.startswith("long-s")]
    assert set(words) == {"interrupted", "REGISTERED"}, "those that wait for a gateway are as they were"
    assert "long: interrupted, 0 of 8 sessions are over" in said
    assert "it has stopped" in said
    shown = inside("status", "--data", data).stdout
    assert [line.split()[1] for line in shown.splitlines() if line.startswith(("long", "past"))] == [
        "interrupted",
        "completed",
    ]
    assert "has stopped" in shown
    assert json.loads(inside("status", "long", "--json", "--data", data).stdout)["stopped"] is True
    assert "it waits for the server: it has stopped" in inside("why", "long", "--data", data).stdout


def test_run_says_once_that_the_server_has_gone_and_that_it_is_back(tmp_path):
    words = ["server", "--data", tmp_path / "data", "--json", "--port"]

    def server(port: str) -> subprocess.Popen[str]:
        return subprocess.Popen(command(*words, port), stdout=subprocess.PIPE, text=True, env=environment())

    first = server("0")
    url = json.loads(first.stdout.readline())["url"]
    file = task_file(tmp_path / "t.jsonl", {"task_id": "patient", **scripted(("call", "hello"))})
    with subprocess.Popen(
        command("run", file, "--server", url), stderr=subprocess.PIPE, text=True, env=environment()
    ) as run:
        assert "patient waits for a gateway" in run.stderr.readline()
        first.kill()
        first.wait()
        assert "the rollout server does not answer; it is asked again for 60 s" in run.stderr.readline()
        second = server(url.rsplit(":", 1)[1])
        try:
            assert "the rollout server is back" in run.stderr.readline()
            run.send_signal(signal.SIGINT)
            assert run.wait(30) == 130
        finally:
            second.send_signal(signal.SIGINT)
            second.wait(30)


def test_it_takes_tasks_while_the_engine_is_not_up_yet(tokenizer, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    words = ["--engine-url", f"http://127.0.0.1:{port}", "--data", tmp_path / "data", "--gateway-port", "0"]
    serve = subprocess.Popen(
        command("serve", *words, "--port", url.rsplit(":", 1)[1]),
        stdout=subprocess.DEVNULL,
        stderr=(tmp_path / "err").open("w"),
        env=environment(),
    )
    try:
        until(lambda: f"the rollout server listens on {url}; waiting for the engine" in (tmp_path / "err").read_text())
        file = task_file(tmp_path / "t.jsonl", {"task_id": "early", **scripted(("call", "hello"))})
        assert inside("submit", file, "--server", url).exit_code == 0
        until(lambda: "it waits for a healthy engine" in inside("why", "early", "--server", url).stdout, 30)
        with subprocess.Popen(
            command("run", file, "--server", url), stderr=subprocess.PIPE, text=True, env=environment()
        ) as run:
            assert "early waits for a healthy engine" in run.stderr.readline()
            with scripted_engine(tokenizer, port=port):
                assert "early: completed" in run.communicate(timeout=60)[1]
    finally:
        serve.send_signal(signal.SIGINT)
        assert serve.wait(30) == 130


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    return save_random_policy(tmp_path_factory.mktemp("policy"), seed=1)


def embedded(policy: Path, data: Path) -> subprocess.Popen:
    words = ["--engine", "embedded", "--model", policy, "--data", data, "--port", "0", "--gateway-port", "0", "--json"]
    return subprocess.Popen(
        command("serve", *words),
        stdout=subprocess.PIPE,
        stderr=(data.parent / "err").open("w"),
        text=True,
        env=environment(),
    )


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_the_embedded_engine_ends_with_us(policy, tmp_path, number, code):
    mine = shutil.copytree(policy, tmp_path / "policy")
    with embedded(mine, tmp_path / "data") as serve:
        told = json.loads(serve.stdout.readline())
        assert told["data"] == str(tmp_path / "data")
        assert inside("doctor", "--engine-url", told["engine_url"], "--engine", "embedded").exit_code == 0
        serve.send_signal(number)
        assert serve.wait(30) == code
    gone(str(mine))


def test_an_engine_that_does_not_start_is_shown_with_its_own_words(tmp_path):
    (tmp_path / "policy").mkdir()
    with embedded(tmp_path / "policy", tmp_path / "data") as serve:
        assert serve.wait(60) == 1
    said = (tmp_path / "err").read_text()
    assert "the embedded engine ended with exit code 1" in said
    assert "--model: " in said


def test_an_engine_that_dies_later_ends_serve_and_its_sandboxes(policy, tmp_path):
    mine = shutil.copytree(policy, tmp_path / "policy")
    with embedded(mine, tmp_path / "data") as serve:
        assert serve.stdout.readline()
        (engine,) = (pid for pid in marked(f"polar.embedded\0--model\0{mine}"))
        os.kill(engine, signal.SIGKILL)
        assert serve.wait(30) == 1
    assert "exit code -9" in (tmp_path / "err").read_text()


def test_a_folder_without_a_server_is_read_by_itself(engine, tmp_path):
    data = tmp_path / "data"
    with polar_serve(data, engine.url) as chain:
        (result,) = chain.run("past", evaluator=None, **scripted(("call", "hello")))
    assert "past" in inside("status", "--data", data).stdout
    assert "3 sampled = 3 trainable" in inside("why", "past", "--data", data).stdout
    assert "ok<|im_end|>" in inside("show", result["session_id"], "--tokens", "--data", data).stdout


def test_server_and_gateway_apart(engine, tmp_path):
    """As on two machines: the gateway has a topology, and the server's token from the environment."""
    topology = tmp_path / "topology.yaml"
    nodes = [{"id": "far", "port": 0, "inference": {"base_url": engine.url}}]
    topology.write_text(json.dumps({"gateway": {"nodes": nodes}}))
    variables = environment(POLAR_CONTROL_PLANE_TOKEN="secret")
    options = {"stdout": subprocess.PIPE, "text": True, "env": variables, "cwd": tmp_path}
    with subprocess.Popen(command("server", "--port", "0", "--json"), **options) as server:
        url = json.loads(server.stdout.readline())["url"]
        with subprocess.Popen(command("gateway", "--topology", topology, "--server", url), **options) as gateway:
            assert "ready" in gateway.stdout.readline()
            file = task_file(tmp_path / "t.jsonl", {"task_id": "apart", **scripted(("call", "hello"))})
            done = inside("run", file, "--server", url, "--json", POLAR_CONTROL_PLANE_TOKEN="secret")
            assert done.exit_code == 0, done.stderr
            assert '"far"' in inside("status", "--json", "--server", url, POLAR_CONTROL_PLANE_TOKEN="secret").stdout
            assert inside("status", "--server", url).exit_code == 2, "without the token"
            for process in (gateway, server):
                process.send_signal(signal.SIGINT)
                assert process.wait(30) == 130
