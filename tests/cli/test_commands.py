"""What a newcomer meets first: help with an example, and errors that name the mistake, its fix and whose it is."""

from __future__ import annotations

import http.server
import importlib.util
import socket
import subprocess
import threading

import pytest

from cli.conftest import command, inside, polar, task_file
from polar.cli.main import COMMANDS

GOOD = {"task_id": "a", "agent": {"harness": "mini_swe_agent"}}


@pytest.fixture
def nobody():
    """A port where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"http://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("name", sorted(COMMANDS.keys() - {"demo"}))  # which takes this process's place
def test_every_command_has_help_with_an_example(name):
    done = inside(name, "--help")
    assert done.exit_code == 0
    assert "Example" in done.output
    assert f"polar {name}" in done.output


def test_a_wrong_file_is_refused_before_the_server_is_asked(tmp_path, nobody):
    file = task_file(tmp_path / "t.jsonl", GOOD, GOOD | {"task_id": "b", "num_samples": 0})
    done = polar("run", file, "--server", nobody)
    assert done.returncode == 2
    assert "line 2: num_samples: Input should be greater than or equal to 1" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["status", "why", "cancel"])
def test_a_task_that_is_unknown_is_named(chain, name):
    done = inside(name, "no-such", "--server", chain.url, "--data", chain.data)
    assert done.exit_code == 2
    assert "the rollout server has no task 'no-such': `polar status` lists those it has" in done.stderr


@pytest.mark.parametrize("name", ["status", "why", "cancel"])
def test_a_server_of_something_else_is_not_one_without_the_task(name):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        done = inside(name, "no-such", "--server", f"http://127.0.0.1:{other.server_address[1]}")
        other.shutdown()
    assert done.exit_code != 0
    assert "has no task" not in done.stderr


def test_no_room_for_what_is_printed_is_said(tmp_path):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command("doctor", "--json"), stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, cwd=tmp_path
        )
    assert (done.returncode, done.stderr) == (1, "error: cannot write: No space left on device\n")


@pytest.mark.parametrize("words", [["run", "FILE"], ["submit", "FILE"], ["status"], ["why", "x"], ["cancel", "x"]])
def test_a_server_that_is_down_is_exit_code_3(tmp_path, nobody, words):
    file = task_file(tmp_path / "t.jsonl", GOOD)
    done = inside(*(file if word == "FILE" else word for word in words), "--server", nobody)
    assert done.exit_code == 3
    assert "polar serve" in done.stderr
    assert nobody in done.stderr


@pytest.mark.parametrize("words", [["status"], ["why", "x"], ["show", "x"], ["rebuild", "x"]])
def test_a_folder_without_a_servers_data_is_named_and_nobody_else_is_asked(tmp_path, chain, words):
    done = inside(*words, "--data", tmp_path / "nowhere", "--server", chain.url)
    assert done.exit_code == 2
    assert f"--data {tmp_path / 'nowhere'} is no data folder of a Polar server" in done.stderr
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("url", ["localhost:8080", "", "ftp://x"])
def test_a_server_that_is_no_url_is_named(url):
    done = inside("status", "--server", url)
    assert done.exit_code == 2
    assert "http://127.0.0.1:8080" in done.stderr


def test_something_else_at_the_servers_address_is_named():
    other = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=other.serve_forever).start()
    try:
        done = inside("status", "--server", f"http://127.0.0.1:{other.server_port}")
    finally:
        other.shutdown()
        other.server_close()
    assert done.exit_code == 2
    assert "404" in done.stderr


def test_results_that_cannot_be_saved_stop_the_run_before_it_starts(tmp_path, nobody):
    file = task_file(tmp_path / "t.jsonl", GOOD)
    done = inside("run", file, "--server", nobody, "--save", tmp_path / "no" / "folder.jsonl")
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--engine-url"),
        (["--engine", "embedded"], "polar_demo.warm_start"),
        (["--engine", "embedded", "--model", "/no/such/folder"], "/no/such/folder is not a folder"),
        (["--engine", "sglang", "--model", "/tmp"], "--model is for --engine embedded"),
        (["--engine-url", "http://127.0.0.1:1", "--engine", "tgi"], "unknown engine 'tgi'"),
        (["--engine-url", "nope"], "inference.base_url: 'nope' is no URL"),
        (["--engine-url", "http://127.0.0.1:1", "--port", "0", "--tokenizer", "/nope"], "--tokenizer) /nope is no"),
        (["--engine-url", "http://127.0.0.1:1", "--port", "99999"], "port"),
        (["--topology", "/no/such.yaml"], "/no/such.yaml"),
    ],
)
def test_serve_names_what_is_wrong_with_its_options(tmp_path, words, said):
    done = inside("serve", *words, "--data", tmp_path / "data", "--gateway-port", "0")
    assert done.exit_code == 2, done.stderr
    assert said in done.stderr


def test_an_option_beside_a_topology_wins_and_unknown_keys_are_refused(tmp_path):
    topology = tmp_path / "topology.yaml"
    topology.write_text("rollout: {prot: 1}\n")
    done = inside("serve", "--topology", topology)
    assert done.exit_code == 2
    assert "rollout.prot" in done.stderr


def test_demo_hands_its_options_over():
    done = polar("demo", "--help")
    assert done.returncode == 0
    assert "--run-dir" in done.stdout


def test_demo_without_torch_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = inside("demo")
    assert done.exit_code == 1
    assert "polar-rl[demo]" in done.stderr
