"""One kill run: a real server and a real gateway that are killed −9 at places drawn by a seed and started again, a
group of tasks that has to come through it, and what must hold afterwards.

`python tests/kill_run.py SEED FOLDER` repeats one run and leaves its folder.
"""

from __future__ import annotations

import json
import os
import random
import re
import socket
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from tokenizers import Tokenizer

from chain import CHECK_ARTIFACT
from gateway_processes import left_behind, processes_with
from peers import killer
from peers.engine import scripted_engine
from peers.harness import scripted
from peers.receiver import Receiver
from peers.supervisor import Supervised
from peers.tokenizer import make_tokenizer
from polar.config import TOKEN_HEADER, TOKEN_VARIABLE
from polar.sessionlog import SessionLog, read

TASKS, SESSIONS, CALLS = 2, 3, 3
KILLS = 2
"""of each process"""
DEADLINE = 120.0
TOKEN = "token-of-the-kill-run"
ANSWER = re.compile(r"answer \d+")


class KillRun:
    def __init__(self, seed: int, folder: Path, engine_url: str, tokenizer: Path) -> None:
        self.seed, self.folder, self.tokenizer = seed, folder, tokenizer
        self.mark = f"mark-of-run-{seed}-{os.getpid()}"
        self.gateway_data, self.server_data = folder / "gateway", folder / "server"
        self.heard: list[str] = []
        self.receiver = Receiver()
        self.receiver.pause = 0.1
        chance = random.Random(seed)
        server, gateway = (killer.plans(points, chance, KILLS) for points in (killer.SERVER, killer.GATEWAY))
        self.plans = {"server": server, "gateway": gateway}
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._topology(engine_url)
        self._pipe = folder / "heard"
        os.mkfifo(self._pipe, 0o666)
        os.chmod(self._pipe, 0o666)
        self._http = httpx.Client(base_url=self._url, headers={TOKEN_HEADER: TOKEN}, timeout=10, trust_env=False)

    def _topology(self, engine_url: str) -> None:
        node = {
            "id": "node-0",
            "port": 0,
            "inference": {"engine": "sglang", "base_url": engine_url, "tokenizer": str(self.tokenizer)},
            "max_init_workers": 2,
            "max_run_workers": 3,
        }
        port = int(self._url.rsplit(":", 1)[1])
        rollout = {"port": port, "save_dir": str(self.server_data), "lease_seconds": 2.0}
        gateway = {"heartbeat_interval_seconds": 0.2, "rollout_server_url": self._url, "nodes": [node]}
        (self.folder / "topology.yaml").write_text(json.dumps({"rollout": rollout, "gateway": gateway}))

    def __str__(self) -> str:
        kills = _text(self.folder / "kills").splitlines()
        return f"seed {self.seed}: planned {self.plans}, killed at {kills}, folder {self.folder}"

    def run(self) -> list[str]:
        """Returns the points at which it was killed. Raises AssertionError that names the seed."""
        (self.folder / "armed").touch()
        listening = threading.Thread(target=self._listen)
        listening.start()
        topology = ["--topology", str(self.folder / "topology.yaml")]
        env = {TOKEN_VARIABLE: TOKEN}
        server = Supervised(["server", *topology], self.folder, "server", self.plans["server"], env)
        gateway_argv = ["gateway", *topology, "--data", str(self.gateway_data)]
        gateway = Supervised(gateway_argv, self.folder, "gateway", self.plans["gateway"], env)
        try:
            self._work(lambda: server.crashes + gateway.crashes)
            (self.folder / "armed").unlink()
        finally:
            for process in (gateway, server):
                process.stop()
            with self._pipe.open("w") as pipe:
                pipe.write("end\n")
            listening.join()
            self.receiver.stop()
        assert server.crashes + gateway.crashes == [], f"crashed: {self}"
        self._check(gateway.pids)
        return _text(self.folder / "kills").splitlines()

    # The work

    def _listen(self) -> None:
        """What harnesses have heard from their model, each answer in its own line."""
        with open(os.open(self._pipe, os.O_RDWR)) as pipe:
            while (line := pipe.readline().strip()) != "end":
                self.heard.append(line)

    def _work(self, crashes: Callable[[], list[Any]]) -> None:
        deadline = time.monotonic() + DEADLINE
        waiting = [f"task-{number}" for number in range(TASKS)]
        for name in waiting:
            while not self._submit(name):
                self._pause(deadline, crashes)
        while not (all(map(self._over, waiting)) and self._handed_over()):
            self._pause(deadline, crashes)

    def _pause(self, deadline: float, crashes: Callable[[], list[Any]]) -> None:
        assert not crashes(), f"a process crashed: {self}"
        assert time.monotonic() < deadline, f"not done in time: {self}"
        time.sleep(0.05)

    def _submit(self, name: str) -> bool:
        calls = [("call", f"{self.mark} turn {number}") for number in range(CALLS)]
        steps = [("hear", str(self._pipe)), *calls, ("write", "$ARTIFACTS_DIR/done")]
        task = {"task_id": name, "instruction": "do it", "num_samples": SESSIONS, "evaluator": CHECK_ARTIFACT}
        task |= {"max_attempts": 20, "callback_url": self.receiver.url} | scripted(*steps, bind=[str(self._pipe)])
        try:
            return self._http.post("/rollout/task/submit", json=task).status_code == 200
        except httpx.HTTPError:
            return False

    def _over(self, name: str) -> bool:
        try:
            answer = self._http.get(f"/rollout/task/{name}", params={"results": "false"})
        except httpx.HTTPError:
            return False
        return answer.status_code == 200 and answer.json()["status"] != "running"

    def _handed_over(self) -> bool:
        if list((self.gateway_data / "outbox").glob("*")) or list((self.gateway_data / "sandboxes").glob("*")):
            return False
        return [row[0] for row in self._rows("SELECT state FROM deliveries")] == ["delivered"] * TASKS

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.server_data}/polar.db?mode=ro", uri=True, timeout=20) as database:
            return database.execute(sql).fetchall()

    # What must hold

    def _check(self, gateway_pids: list[int]) -> None:
        why = str(self)
        winners = self._one_result_a_session(why)
        logs = {path.name.removesuffix(".zst"): read(path) for path in (self.server_data / "logs").glob("*.zst")}
        stored = {text for log in logs.values() for text in _answers(log)}
        assert set(self.heard) <= stored, f"lost completions {set(self.heard) - stored}: {why}"
        self._callbacks(winners, logs, why)
        assert processes_with(self.mark) == [], why
        assert left_behind(self.gateway_data, gateway_pids) == [], why
        kept = [path for path in self.folder.rglob("*") if path.suffix in (".part", ".result", ".log", ".zst")]
        left = [path for path in kept if path.suffix == ".part" or path.is_relative_to(self.gateway_data)]
        assert left == [], f"left {left}: {why}"

    def _one_result_a_session(self, why: str) -> dict[str, int]:
        sessions = self._rows("SELECT session_id, task_id, status, winner FROM sessions")
        assert len(sessions) == TASKS * SESSIONS, why
        assert {row[2] for row in sessions} == {"COMPLETED"}, f"{sessions}: {why}"
        attempts = self._rows("SELECT session_id, number, state FROM attempts ORDER BY number")
        won = [(session, number) for session, number, state in attempts if state == "won"]
        assert sorted(won) == sorted((row[0], row[3]) for row in sessions), f"{won}: {why}"
        assert not [row for row in attempts if row[2] == "leased"], f"{attempts}: {why}"
        for session, task, _, winner in sessions:
            assert (self.server_data / "tasks" / task / f"{session}.{winner}.result").is_file(), why
            assert (self.server_data / "logs" / f"{session}.{winner}.zst").is_file(), why
        return {row[0]: row[3] for row in sessions}

    def _callbacks(self, winners: dict[str, int], logs: dict[str, SessionLog], why: str) -> None:
        bodies, ids = defaultdict(set), defaultdict(set)
        for body, delivery in zip(self.receiver.bodies, self.receiver.deliveries, strict=True):
            name = json.loads(body)["task_id"]
            bodies[name].add(body)
            ids[name].add(delivery)
        assert {name: len(found) for name, found in bodies.items()} == {f"task-{n}": 1 for n in range(TASKS)}, why
        assert all(len(found) == 1 for found in ids.values()), why
        results = [result for (body,) in bodies.values() for result in json.loads(body)["results"]]
        told = sorted((result["session_id"], result["metadata"]["attempt"]) for result in results)
        assert told == sorted(winners.items()), f"{told}: {why}"
        trained = Counter(text for result in results for text in self._trained(result))
        assert max(trained.values()) == 1, f"trained twice {trained}: {why}"
        for result in results:
            own = _answers(logs[f"{result['session_id']}.{result['metadata']['attempt']}"])
            assert sorted(self._trained(result)) == sorted(own), why
            assert len(own) == CALLS, why

    def _trained(self, result: dict[str, Any]) -> list[str]:
        """The answers that its traces train."""
        decoder = Tokenizer.from_file(str(self.tokenizer / "tokenizer.json"))
        texts = []
        for trace in result["trajectory"]["traces"]:
            ids, mask = np.array(trace["response_ids"]), np.array(trace["loss_mask"])
            texts.append(decoder.decode(ids[mask == 1].tolist(), skip_special_tokens=False))
        return [answer for text in texts for answer in ANSWER.findall(text)]


def _answers(log: SessionLog) -> list[str]:
    return [call.finished.message["content"] for call in log.calls if call.finished and call.finished.message]


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    where = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="kill-run-"))
    where.mkdir(exist_ok=True)
    with scripted_engine(made := make_tokenizer(where / "tokenizer"), numbered=True) as scripted_one:
        print(KillRun(int(sys.argv[1]), where, scripted_one.url, made).run())
