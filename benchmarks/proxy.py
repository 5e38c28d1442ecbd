"""What the model proxy adds to a call, beside a bare relay (and LiteLLM's proxy) in the same run.

  latency     100 calls/s (Poisson), bodies of 2 kB and 200 kB, an engine that takes 500 ms, conversations that go on:
              milliseconds that the proxy adds at the median and at p99, and its CPU a call beside the relay's; engine,
              relay and proxy take turns of some seconds, so that a machine that changes its pace is the same for all
  neighbours  the same with 2 kB, while one more session posts 20 pictures of a megabyte, or a new megabyte of text,
              twice a second: how much longer the other 200 wait at p99
  throughput  64 clients that never wait, an engine that takes no time: calls/s beside the relay's and LiteLLM's
  queue       4,000 calls at once against 1,000, over 256 connections to the engine: how the time grows
  memory      resident bytes a prompt token and a sampled token of sessions that are open
  rendering   100,000 tokens rendered cold, beside the tokenizer alone

The measured process has a core of its own; engine and load share the other.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml
from peers_of_the_proxy import make_tokenizer, words
from tokenizers import Tokenizer

from polar.proxy import load_rendering

PEERS = Path(__file__).with_name("peers_of_the_proxy.py")
CORES = sorted(os.sched_getaffinity(0))
RATE, ROUNDS, ROUND_SECONDS, SESSIONS, ENGINE_SECONDS = 100.0, 5, 4.0, 200, 0.5
CONNECTIONS = 256
BODIES = {"2 kB": 2_000, "200 kB": 200_000}
TICKS = os.sysconf("SC_CLK_TCK")


class Measured:
    """A process on the last core."""

    def __init__(self, process: subprocess.Popen[str], url: str) -> None:
        self.process, self.url = process, url

    def cpu(self) -> float:
        """Seconds used so far, children included while they live."""
        return sum(_cpu(pid) for pid in _family(self.process.pid))

    def resident(self) -> int:
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(text.partition("VmRSS:")[2].split()[0]) * 1024


@contextlib.contextmanager
def running(command: list[str], core: int, url: str | None = None, **environment: str) -> Iterator[Measured]:
    """The process of a command; its URL is a line that it prints, unless it is given."""
    process = subprocess.Popen(
        ["taskset", "-c", str(core), *command],
        stdout=subprocess.PIPE if url is None else subprocess.DEVNULL,
        stderr=None if url is None else subprocess.DEVNULL,
        text=True,
        env=os.environ | environment,
    )
    try:
        yield Measured(process, url or _url(process))
    finally:
        process.terminate()
        process.wait(30)


def peer(role: str, tokenizer: Path, core: int, **options: Any) -> contextlib.AbstractContextManager[Measured]:
    flags = [text for name, value in options.items() for text in (f"--{name}", str(value))]
    return running([sys.executable, str(PEERS), role, "--tokenizer", str(tokenizer), *flags], core)


def _url(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("http://"):
            return line.strip()
    raise AssertionError("the process ended before it said its URL")


def _family(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(each for child in children for each in _family(int(child)))]


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Conversation:
    """One session's harness: each turn sends all that was said, and one more question."""

    def __init__(self, number: int, size: int) -> None:
        self.key = f"key-{number}"
        self.messages = [{"role": "user", "content": words(size // 6, number)[:size]}]

    async def turn(self, http: aiohttp.ClientSession, url: str) -> float:
        """Seconds until the whole answer was there."""
        body = json.dumps({"model": "policy", "messages": self.messages}).encode()
        headers = {"Authorization": f"Bearer {self.key}", "Content-Type": "application/json"}
        started = time.perf_counter()
        async with http.post(url + "/v1/chat/completions", data=body, headers=headers) as answer:
            data = await answer.read()
            taken = time.perf_counter() - started
        assert answer.status == 200, data[:500]
        said = json.loads(data)["choices"][0]["message"]["content"]
        self.messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then?"}]
        return taken


def load(work: Callable[[aiohttp.ClientSession], Any]) -> Any:
    async def run() -> Any:
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as http:
            return await work(http)

    return asyncio.run(run())


class Clients:
    """Sessions that talk to one target, of which an idle one takes each call; times in seconds."""

    def __init__(self, http: aiohttp.ClientSession, target: Measured, size: int) -> None:
        self.times: list[float] = []
        self.cpu = 0.0
        self._http, self._target = http, target
        self._talks = [Conversation(number, size) for number in range(SESSIONS)]
        self._idle: asyncio.Queue[Conversation] = asyncio.Queue()

    async def warm_up(self) -> None:
        for start in range(0, SESSIONS, 50):
            await asyncio.gather(*(self._turn(talk) for talk in self._talks[start : start + 50]))
        self.times.clear()

    @property
    def p99(self) -> float:
        return float(np.percentile(self.times, 99))

    async def poisson(self, source: random.Random) -> None:
        before, due = self._target.cpu(), time.perf_counter()
        end = due + ROUND_SECONDS
        async with asyncio.TaskGroup() as group:
            while (due := due + source.expovariate(RATE)) < end:
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._one())
        self.cpu += self._target.cpu() - before

    async def _one(self) -> None:
        await self._turn(await self._idle.get())

    async def _turn(self, talk: Conversation) -> None:
        self.times.append(await talk.turn(self._http, self._target.url))
        self._idle.put_nowait(talk)


async def in_turns(http: aiohttp.ClientSession, targets: list[Measured], size: int) -> list[Clients]:
    clients = [Clients(http, target, size) for target in targets]
    for each in clients:
        await each.warm_up()
    source = random.Random(0)
    for _ in range(ROUNDS):
        for each in clients:
            await each.poisson(source)
    return clients


def latency(tokenizer: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    with peer("engine", tokenizer, CORES[0], seconds=ENGINE_SECONDS) as engine:
        for name, size in BODIES.items():
            with (
                peer("relay", tokenizer, CORES[-1], engine=engine.url) as relay,
                peer("proxy", tokenizer, CORES[-1], engine=engine.url, sessions=SESSIONS) as proxy,
            ):
                targets = [engine, relay, proxy]
                direct, bare, ours = load(lambda http, targets=targets, size=size: in_turns(http, targets, size))
            row = {}
            for who, clients in (("", ours), ("relay_", bare)):
                for percent in (50, 99):
                    added = np.percentile(clients.times, percent) - np.percentile(direct.times, percent)
                    row[f"{who}added_p{percent}_ms"] = 1000 * float(added)
            cpu = {"cpu_ms_per_call": 1000 * ours.cpu / len(ours.times)}
            found[name] = row | cpu | {"cpu_to_relay": ours.cpu / len(ours.times) / (bare.cpu / len(bare.times))}
    return found


def neighbours(tokenizer: Path) -> dict[str, Any]:
    with (
        peer("engine", tokenizer, CORES[0], seconds=ENGINE_SECONDS) as engine,
        peer("proxy", tokenizer, CORES[-1], engine=engine.url, sessions=SESSIONS + 1) as proxy,
    ):
        [alone] = load(lambda http: in_turns(http, [proxy], 2_000))
        found = {"p99_alone_ms": 1000 * alone.p99}
        for body in ("pictures", "text"):
            with peer("heavy", tokenizer, CORES[0], proxy=proxy.url, key=f"key-{SESSIONS}", body=body):
                [beside] = load(lambda http: in_turns(http, [proxy], 2_000))
            found |= {f"p99_beside_{body}_ms": 1000 * beside.p99, f"p99_{body}_to_alone": beside.p99 / alone.p99}
    return found


async def closed_loop(http: aiohttp.ClientSession, url: str, clients: int, seconds: float) -> float:
    """Calls a second; each client starts its conversation anew after ten turns."""
    done, end = 0, time.perf_counter() + seconds

    async def client(number: int) -> None:
        nonlocal done
        while time.perf_counter() < end:
            talk = Conversation(number, 2_000)
            for _ in range(10):
                await talk.turn(http, url)
                done += time.perf_counter() < end

    await asyncio.gather(*(client(number) for number in range(clients)))
    return done / seconds


def throughput(tokenizer: Path, litellm: Path | None) -> dict[str, Any]:
    clients, seconds, found = 64, 8.0, {}
    with peer("engine", tokenizer, CORES[0], seconds=0) as engine:
        with peer("relay", tokenizer, CORES[-1], engine=engine.url) as relay:
            found["relay"] = load(lambda http: closed_loop(http, relay.url, clients, seconds))
        with peer("proxy", tokenizer, CORES[-1], engine=engine.url, sessions=clients) as proxy:
            found["polar"] = load(lambda http: closed_loop(http, proxy.url, clients, seconds))
        if litellm is not None:
            with lite(litellm, engine.url, tokenizer.parent) as peer_proxy:
                found["litellm"] = load(lambda http: closed_loop(http, peer_proxy.url, clients, seconds))
            found["polar_to_litellm"] = found["polar"] / found["litellm"]
    found["polar_to_relay"] = found["polar"] / found["relay"]
    return found


@contextlib.contextmanager
def lite(program: Path, engine: str, folder: Path) -> Iterator[Measured]:
    """LiteLLM's proxy in front of the engine, from its own environment; keys are not checked."""
    config = folder / "litellm.yaml"
    params = {"model": "openai/policy", "api_base": engine + "/v1", "api_key": "none"}
    settings = {"telemetry": False, "request_timeout": 60}
    model = {"model_name": "policy", "litellm_params": params}
    config.write_text(yaml.safe_dump({"model_list": [model], "litellm_settings": settings}))
    port = 40_000 + os.getpid() % 10_000
    url = f"http://127.0.0.1:{port}"
    command = [str(program), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
    environment = {
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "LITELLM_LOG": "ERROR",
        "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true",
    }
    with running(command, CORES[-1], url, **environment) as peer_proxy:
        load(lambda http: _up(http, url, peer_proxy.process))
        yield peer_proxy


async def _up(http: aiohttp.ClientSession, url: str, process: subprocess.Popen[str]) -> None:
    async with asyncio.timeout(180):
        while True:
            if process.poll() is not None:
                raise SystemExit(f"{process.args[3]} does not start: try it by hand")
            with contextlib.suppress(aiohttp.ClientError):
                await Conversation(0, 100).turn(http, url)
                return
            await asyncio.sleep(0.5)


def queue(tokenizer: Path) -> dict[str, Any]:
    async def burst(http: aiohttp.ClientSession, target: Measured, count: int) -> tuple[float, float]:
        talks = [Conversation(number, 2_000) for number in range(count)]
        before, started = target.cpu(), time.perf_counter()
        await asyncio.gather(*(talk.turn(http, target.url) for talk in talks))
        return time.perf_counter() - started, (target.cpu() - before) / count

    found: dict[str, Any] = {}
    with peer("engine", tokenizer, CORES[0], seconds=0.05) as engine:
        for count in (400, 1000, 4000):
            options = {"sessions": count, "connections": CONNECTIONS}
            with peer("proxy", tokenizer, CORES[-1], engine=engine.url, **options) as proxy:
                seconds, cpu = load(lambda http, proxy=proxy, count=count: burst(http, proxy, count))
            found[str(count)] = {"seconds": seconds, "cpu_ms_per_call": 1000 * cpu}
    found["time_4000_to_1000"] = found["4000"]["seconds"] / found["1000"]["seconds"]
    found["cpu_4000_to_400"] = found["4000"]["cpu_ms_per_call"] / found["400"]["cpu_ms_per_call"]
    return found


def memory(tokenizer: Path) -> dict[str, Any]:
    """Two kinds of sessions of 60,000 tokens, 5 turns each: nearly all prompt, and half sampled; two equations."""

    async def fill(http: aiohttp.ClientSession, target: Measured, keys: range, size: int) -> None:
        limit = asyncio.Semaphore(8)

        async def talk(number: int) -> None:
            async with limit:
                session = Conversation(number, 100)
                for turn in range(5):
                    session.messages[-1]["content"] = words(size, number * 10 + turn)
                    await session.turn(http, target.url)

        await asyncio.gather(*(talk(number) for number in keys))

    slopes = {}
    for sampled in (20, 6_000):
        size = (60_000 - 5 * sampled) // 5
        with (
            peer("engine", tokenizer, CORES[0], seconds=0, sampled=sampled) as engine,
            peer("proxy", tokenizer, CORES[-1], engine=engine.url, sessions=200) as proxy,
        ):
            points = []
            for start, end in ((0, 50), (50, 100), (100, 200)):
                load(lambda http, a=start, b=end, proxy=proxy, size=size: fill(http, proxy, range(a, b), size))
                points.append((end, proxy.resident()))
        counts, bytes_ = zip(*points, strict=True)
        slopes[sampled] = float(np.polyfit(counts, bytes_, 1)[0])
    prompts = {sampled: 60_000 - 5 * sampled for sampled in slopes}
    equations = [[prompts[sampled], 5 * sampled] for sampled in slopes]
    prompt, answer = np.linalg.solve(equations, list(slopes.values()))
    return {"bytes_per_prompt_token": float(prompt), "bytes_per_sampled_token": float(answer)}


def rendering(tokenizer: Path) -> dict[str, Any]:
    made, bare = load_rendering(tokenizer), Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    messages = [{"role": "user", "content": words(1000, at)} for at in range(100)]
    text = "\n".join(message["content"] for message in messages)
    ours = _best(lambda: made.render(messages, None))
    floor = _best(lambda: bare.encode(text))
    return {"tokens": len(made.render(messages, None)), "milliseconds": 1000 * ours, "to_tokenizer_alone": ours / floor}


def _best(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(5):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", help="latency, neighbours, throughput, queue, memory, rendering")
    parser.add_argument("--litellm", type=Path, help="the litellm program of an environment of its own")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    os.sched_setaffinity(0, {CORES[0]})
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = make_tokenizer(Path(folder) / "tokenizer")
        parts: dict[str, Callable[[], dict[str, Any]]] = {
            "latency": lambda: latency(tokenizer),
            "neighbours": lambda: neighbours(tokenizer),
            "throughput": lambda: throughput(tokenizer, arguments.litellm),
            "queue": lambda: queue(tokenizer),
            "memory": lambda: memory(tokenizer),
            "rendering": lambda: rendering(tokenizer),
        }
        found = {}
        for name in arguments.only or parts:
            found[name] = parts[name]()
            if not arguments.json:
                print(f"\n{name}")
                _print(found[name])
    if arguments.json:
        print(json.dumps(found))


def _print(rows: dict[str, Any], indent: str = "  ") -> None:
    for name, value in rows.items():
        if isinstance(value, dict):
            print(f"{indent}{name}")
            _print(value, indent + "  ")
        else:
            print(f"{indent}{name:32}{value:12,.2f}")


if __name__ == "__main__":
    main()
