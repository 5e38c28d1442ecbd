"""One kill run: a real server and two real gateways that are killed −9 at places drawn by a seed and started again,
tasks that have to come through it, and what must hold afterwards.

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
from contextlib import ExitStack, closing
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

DONE, CANCELLED = ("task-0", "task-1"), "task-cancelled"
SESSIONS, CALLS = 2, 2
SERVER_KILLS, GATEWAY_KILLS = 2, 3
GATEWAYS = ("gateway-0", "gateway-1")
DEADLINE = 300.0
TOKEN = "token-of-the-kill-run"
ANSWER = re.compile(r"answer \d+")


class KillRun:
    def __init__(self, seed: int, folder: Path, engine_url: str, tokenizer: Path) -> None:
        self.seed, self.folder, self.tokenizer = seed, folder, tokenizer
        self.mark = f"mark-of-run-{seed}-{os.getpid()}"
        self.data = folder / "server-data"
        self.heard: list[str] = []
        self.receiver = Receiver()
        self.receiver.pause = 0.1
        self._draw()
        self._url = f"http://127.0.0.1:{_free_port()}"
        self._topology(engine_url)
        self._pipe = folder / "heard"
        os.mkfifo(self._pipe)
        self._pipe.chmod(0o666)
        self._http = httpx.Client(base_url=self._url, headers={TOKEN_HEADER: TOKEN}, timeout=10, trust_env=False)

    def _draw(self) -> None:
        """Which lives end how; the gateways share the plans drawn for them."""
        chance = random.Random(self.seed)
        ends = killer.plans(killer.GATEWAY, chance, GATEWAY_KILLS)
        self.plans = {"server": killer.plans(killer.SERVER, chance, SERVER_KILLS)}
        self.plans |= {name: ends[number :: len(GATEWAYS)] for number, name in enumerate(GATEWAYS)}

    def _topology(self, engine_url: str) -> None:
        inference = {"engine": "sglang", "base_url": engine_url, "tokenizer": str(self.tokenizer)}
        nodes = [{"id": name, "port": 0, "inference": inference, "max_run_workers": 4} for name in GATEWAYS]
        port = int(self._url.rsplit(":", 1)[1])
        rollout = {"port": port, "save_dir": str(self.data), "lease_seconds": 2.0}
        gateway = {"heartbeat_interval_seconds": 0.2, "rollout_server_url": self._url, "nodes": nodes}
        (self.folder / "topology.yaml").write_text(json.dumps({"rollout": rollout, "gateway": gateway}))

    def __str__(self) -> str:
        return f"seed {self.seed}: planned {self.plans}, met {self.met()}, folder {self.folder}"

    def met(self) -> list[str]:
        """The points at which something was killed."""
        kills = self.folder / "kills"
        return kills.read_text().splitlines() if kills.exists() else []

    def run(self) -> list[str]:
        """Returns the points met. Raises AssertionError that names the seed."""
        (self.folder / "armed").touch()
        listening = threading.Thread(target=self._listen)
        listening.start()
        processes: list[Supervised] = []
        with ExitStack() as stack:
            stack.callback(self.receiver.stop)
            stack.callback(listening.join)
            stack.callback(lambda: self._pipe.write_text("end\n"))
            for name in ("server", *GATEWAYS):
                processes.append(self._start(name))
                stack.callback(processes[-1].stop)
            self._work(lambda: [crash for each in processes for crash in each.crashes])
            (self.folder / "armed").unlink()
        crashes = [crash for each in processes for crash in each.crashes]
        assert crashes == [], f"crashed {crashes}: {self}"
        self._check({each.name: each.pids for each in processes})
        return self.met()

    def _start(self, name: str) -> Supervised:
        argv = ["server"] if name == "server" else ["gateway", "--node-id", name, "--data", str(self.folder / name)]
        argv += ["--topology", str(self.folder / "topology.yaml")]
        return Supervised(name, argv, self.folder, self.plans[name], {TOKEN_VARIABLE: TOKEN})

    # The work

    def _listen(self) -> None:
        """What harnesses have heard from their model, each answer in its own line."""
        with open(os.open(self._pipe, os.O_RDWR)) as pipe:
            while (line := pipe.readline().strip()) != "end":
                self.heard.append(line)

    def _work(self, crashes: Callable[[], list[Any]]) -> None:
        deadline = time.monotonic() + DEADLINE

        def until(holds: Callable[[], bool]) -> None:
            while not holds():
                assert not crashes(), f"crashed {crashes()}: {self}"
                assert time.monotonic() < deadline, f"not done in time: {self}"
                time.sleep(0.05)

        calls = [("call", f"{self.mark} turn {number}") for number in range(CALLS)]
        until(lambda: self._submit(CANCELLED, calls[0], ("sleep", 600)))
        for name in DONE:
            until(lambda name=name: self._submit(name, *calls, ("write", "$ARTIFACTS_DIR/done")))
        until(lambda: self._status(DONE[0]) == "completed")
        until(lambda: self._ask("DELETE", CANCELLED) is not None)
        until(lambda: self._status(DONE[1]) == "completed" and self._status(CANCELLED) == "cancelled")
        until(self._handed_over)

    def _submit(self, name: str, *steps: tuple[str, Any]) -> bool:
        task = {"task_id": name, "instruction": "do it", "num_samples": SESSIONS, "evaluator": CHECK_ARTIFACT}
        task |= {"max_attempts": 20, "callback_url": self.receiver.url}
        task |= scripted(("hear", str(self._pipe)), *steps, bind=[str(self._pipe)])
        return self._ask("POST", "submit", json=task) is not None

    def _status(self, name: str) -> str | None:
        document = self._ask("GET", name, params={"results": "false"})
        return document["status"] if document else None

    def _ask(self, method: str, path: str, **options: Any) -> dict[str, Any] | None:
        """None when the server is away."""
        try:
            answer = self._http.request(method, f"/rollout/task/{path}", **options)
        except httpx.HTTPError:
            return None
        return answer.json() if answer.status_code == 200 else None

    def _handed_over(self) -> bool:
        kept = [path for name in GATEWAYS for part in ("outbox", "sandboxes") for path in self._kept(name, part)]
        states = [row[0] for row in self._rows("SELECT state FROM deliveries")]
        return not kept and states == ["delivered"] * (len(DONE) + 1)

    def _kept(self, name: str, part: str) -> list[Path]:
        return list((self.folder / name / part).glob("*"))

    def _rows(self, sql: str) -> list[tuple[Any, ...]]:
        address = f"file:{self.data}/polar.db?mode=ro"
        with closing(sqlite3.connect(address, uri=True, timeout=20)) as database:
            return database.execute(sql).fetchall()

    # What must hold

    def _check(self, pids: dict[str, list[int]]) -> None:
        why = str(self)
        winners = self._one_result_a_session(why)
        logs = {path.name.removesuffix(".zst"): read(path) for path in (self.data / "logs").glob("*.zst")}
        stored = {text for log in logs.values() for text in _answers(log)}
        assert set(self.heard) <= stored, f"lost completions {set(self.heard) - stored}: {why}"
        self._check_callbacks(winners, logs, why)
        assert processes_with(self.mark) == [], why
        for name in GATEWAYS:
            assert left_behind(self.folder / name, pids[name]) == [], why
        parts = [*self.folder.rglob("*.part"), *(self.data / "unfinished").glob("*")]
        assert parts + [path for name in GATEWAYS for path in self._kept(name, "outbox")] == [], why

    def _one_result_a_session(self, why: str) -> dict[str, int]:
        """Attempt that was accepted, by session, of the tasks that were not cancelled."""
        sessions = self._rows("SELECT session_id, task_id, status, winner, termination FROM sessions")
        assert Counter(row[1] for row in sessions) == dict.fromkeys((*DONE, CANCELLED), SESSIONS), why
        endings = {name: {row[4] for row in sessions if row[1] == name} for name in (*DONE, CANCELLED)}
        assert endings == {name: {"done"} for name in DONE} | {CANCELLED: {"cancelled"}}, f"{endings}: {why}"
        attempts = self._rows("SELECT session_id, number, state FROM attempts")
        won = sorted((session, number) for session, number, state in attempts if state == "won")
        assert won == sorted((row[0], row[3]) for row in sessions if row[3]), f"{won}: {why}"
        assert not [row for row in attempts if row[2] == "leased"], f"{attempts}: {why}"
        for session, task, _, winner, _ in sessions:
            if winner:
                assert (self.data / "tasks" / task / f"{session}.{winner}.result").is_file(), why
        return {row[0]: row[3] for row in sessions if row[1] in DONE}

    def _check_callbacks(self, winners: dict[str, int], logs: dict[str, SessionLog], why: str) -> None:
        bodies, ids = defaultdict(set), defaultdict(set)
        for body, delivery in zip(self.receiver.bodies, self.receiver.deliveries, strict=True):
            name = json.loads(body)["task_id"]
            bodies[name].add(body)
            ids[name].add(delivery)
        once = dict.fromkeys((*DONE, CANCELLED), 1)
        assert {name: len(found) for name, found in bodies.items()} == once, why
        assert {name: len(found) for name, found in ids.items()} == once, why
        results = [result for name in DONE for body in bodies[name] for result in json.loads(body)["results"]]
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


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


if __name__ == "__main__":
    where = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="kill-run-"))
    where.mkdir(exist_ok=True)
    with scripted_engine(made := make_tokenizer(where / "tokenizer"), numbered=True) as scripted_one:
        print(KillRun(int(sys.argv[1]), where, scripted_one.url, made).run())
