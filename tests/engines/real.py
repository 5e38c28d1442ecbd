"""Real engines on a CPU, each a process group of its own, and what the tests ask of all of them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest

from polar.sessionlog import Call, SessionLog
from running_proxy import OpenSession, until, user

PEERS = Path(__file__).parents[1] / "peers"
STANDIN = PEERS / "sglang_standin"
_OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
START_SECONDS = 400
SCHEMA = {
    "type": "object",
    "properties": {"done": {"type": "boolean"}, "level": {"enum": [1, 2, 3]}},
    "required": ["done", "level"],
    "additionalProperties": False,
}
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "runs a command",
        "parameters": {"type": "object", "properties": {"cmd": {"enum": ["ls", "pwd"]}}, "required": ["cmd"]},
    },
}


def program(variable: str, what: str) -> str:
    if not (path := os.environ.get(variable)):
        pytest.skip(f"{what} is not named: {variable}")
    return path


class RealEngine:
    """One that is up. `python` is its environment's."""

    def __init__(self, url: str, python: str, model: Path) -> None:
        self.url, self.python, self.model = url, python, model
        self.http = httpx.Client(base_url=url, timeout=120, trust_env=False)

    def post(self, path: str, **body: Any) -> Any:
        answer = self.http.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.content.startswith((b"{", b"[")) else answer.text

    def recomputed(self, dtype: str, temperature: float, calls: Sequence[tuple[list[int], list[int]]]) -> list[Any]:
        return recomputed(self.python, self.model, dtype, temperature, calls)


def recomputed(
    python: str, model: Path, dtype: str, temperature: float, calls: Sequence[tuple[list[int], list[int]]]
) -> list[np.ndarray]:
    asked = {"model": str(model), "dtype": dtype, "temperature": temperature, "sequences": calls}
    command = [python, "-W", "ignore", str(PEERS / "recompute.py")]
    environment = {**os.environ, **_OFFLINE}
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [np.asarray(values) for values in json.loads(done.stdout)]


def make_models(python: str, folder: Path) -> list[Path]:
    """Two sets of weights of one shape."""
    made = [folder / f"tiny-{seed}" for seed in (1, 2)]
    for seed, model in enumerate(made, 1):
        command = [python, "-W", "ignore", str(PEERS / "tiny_model.py"), str(model), str(seed)]
        subprocess.run(command, check=True, capture_output=True, env={**os.environ, **_OFFLINE})
    return made


@contextlib.contextmanager
def sglang(python: str, model: Path, log: Path, *options: str, **environment: str) -> Iterator[RealEngine]:
    fixed = "--device cpu --attention-backend torch_native --disable-overlap-schedule --disable-cuda-graph"
    sizes = "--mem-fraction-static 0.2 --max-total-tokens 40000"
    command = [python, "-W", "ignore", str(STANDIN / "launch.py"), "--model-path", str(model)]
    settings = {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(STANDIN), **environment}
    with _up([*command, *fixed.split(), *sizes.split(), *options], log, settings) as url:
        yield RealEngine(url, python, model)


@contextlib.contextmanager
def vllm(python: str, model: Path, log: Path, *options: str) -> Iterator[RealEngine]:
    settings = {"VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    settings["VLLM_SERVER_DEV_MODE"] = "1"
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    fixed = "--served-model-name policy --max-num-seqs 8 --enforce-eager"
    tools = "--enable-auto-tool-choice --tool-call-parser hermes"
    with _up([*command, *fixed.split(), *tools.split(), *options], log, settings) as url:
        yield RealEngine(url, python, model)


@contextlib.contextmanager
def router(python: str, worker: str, log: Path) -> Iterator[str]:
    """SGLang's router in front of one engine; its URL."""
    metrics = ["--prometheus-port", str(_free_port())]
    command = [python, "-m", "sglang_router.launch_router", "--worker-urls", worker, "--policy", "round_robin"]
    with _up([*command, *metrics], log, {}) as url:
        deadline = time.monotonic() + 60
        while not httpx.get(url + "/workers", trust_env=False).json().get("total"):
            assert time.monotonic() < deadline, log.read_text()[-2000:]
            time.sleep(0.2)
        yield url


@contextlib.contextmanager
def _up(command: list[str], log: Path, settings: dict[str, str]) -> Iterator[str]:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    environment = {**os.environ, **_OFFLINE, **settings}
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=log.parent,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + START_SECONDS
        while not _healthy(url):
            up = process.poll() is None and time.monotonic() < deadline
            assert up, f"{' '.join(command)}\n{log.read_text(errors='replace')[-4000:]}"
            time.sleep(0.5)
        yield url
    finally:
        for signal_number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal_number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)


def _healthy(url: str) -> bool:
    try:
        return httpx.get(url + "/health", timeout=30, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return sock.getsockname()[1]


def streamed(session: OpenSession, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    """One streamed chat completion; the answer is appended to `messages`."""
    client = openai.OpenAI(base_url=session.url + "/v1", api_key=session.key, max_retries=0, timeout=120)
    with client, client.chat.completions.create(model="policy", messages=messages, stream=True, **fields) as chunks:
        said = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    messages.append({"role": "assistant", "content": "".join(said)})
    return messages[-1]


def converse(session: OpenSession, turns: int = 4, **fields: Any) -> None:
    """Turns one after another, streamed and whole by turns."""
    messages = [{"role": "user", "content": "hello there"}]
    for turn in range(turns):
        if turn % 2:
            streamed(session, messages, **fields)
        else:
            session.turn(messages, **fields)
        messages.append({"role": "user", "content": f"and now number {turn}"})


def sequences(log: SessionLog, calls: Sequence[Call]) -> list[tuple[list[int], list[int]]]:
    return [(log.prompt_ids(call).tolist(), call.ids.tolist()) for call in calls]


def gap(recorded: Sequence[Call], recomputed: Sequence[np.ndarray]) -> tuple[float, float]:
    """Largest and mean distance of logprobs."""
    pairs = zip(recorded, recomputed, strict=True)
    distances = np.abs(np.concatenate([call.logprobs - values for call, values in pairs]))
    return float(distances.max()), float(distances.mean())


def gaps(
    engine: RealEngine, log: SessionLog, temperature: float, note: pytest.FixtureRequest
) -> dict[str, tuple[float, float]]:
    """By precision of the trainer; printed, for docs/engines.md."""
    told = {
        dtype: gap(log.calls, engine.recomputed(dtype, temperature, sequences(log, log.calls)))
        for dtype in ("float32", "bfloat16")
    }
    count = sum(len(call.ids) for call in log.calls)
    for dtype, (most, mean) in told.items():
        print(f"\n{note.node.name}: {count} tokens against transformers in {dtype}: max {most:.2e}, mean {mean:.2e}")
    return told


def check_gone(session: OpenSession, running: Callable[[], int]) -> None:
    """A client that hangs up on its stream behind the first bytes leaves no call `running` at the engine."""
    asked = {"model": "policy", "messages": [user("write a lot")], "stream": True, "max_tokens": 1500}
    headers = {"Authorization": f"Bearer {session.key}"}
    with httpx.stream(
        "POST", session.url + "/v1/chat/completions", json=asked, headers=headers, trust_env=False
    ) as answer:
        next(answer.iter_bytes())
        until(lambda: running() == 1, 30)
    until(lambda: running() == 0, 30)
    _, log = session.end()
    assert 0 < len(log.calls[0].ids) < 1500
    assert session.build().tokens.excluded == {"aborted": len(log.calls[0].ids)}


def check_stops(session: OpenSession, running: Callable[[], int]) -> None:
    """Stop texts, whole and streamed; a length; a prompt that does not fit."""
    letters = ["e", "a", "o", "t"]
    for say in (type(session).turn, streamed):
        answer = say(session, [user("talk")], stop=letters, max_tokens=900)
        assert not any(letter in answer["content"] for letter in letters)
        finished = session.log.calls[-1].finished
        assert finished.finish_reason == "stop"
        assert finished.matched in letters
    streamed(session, [user("talk")], max_tokens=3)
    assert (session.log.calls[-1].finished.finish_reason, len(session.log.calls[-1].ids)) == ("length", 3)
    refused = session.post({"model": "policy", "messages": [user("too much " * 400)]})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert running() == 0


def doctor(url: str, kind: str) -> dict[str, tuple[bool | None, str]]:
    """What `polar doctor` says of the engine."""
    command = [sys.executable, "-c", "from polar.cli.main import main; main()"]
    options = ["doctor", "--json", "--engine-url", url, "--engine", kind]
    done = subprocess.run([*command, *options], capture_output=True, text=True, check=False)
    checks = json.loads(done.stdout)["checks"]
    return {item["what"]: (item["ok"], item["found"]) for item in checks if item["subject"].startswith("engine")}


def check_forms(session: OpenSession, stream: bool) -> None:
    """An answer under a schema, one that must call a tool, and a free one, of which only the last is trained."""
    form = {"type": "json_schema", "json_schema": {"name": "state", "schema": SCHEMA, "strict": True}}
    asked = {"model": "policy", "messages": [user("how is it?")], "max_tokens": 900, "stream": stream}
    assert json.loads(text_of(session.post(asked | {"response_format": form}), stream)).keys() == {"done", "level"}
    choice = {"type": "function", "function": {"name": "bash"}}
    answered = session.post(asked | {"messages": [user("look")], "tools": [BASH], "tool_choice": choice})
    assert answered.status_code == 200, answered.text
    [call] = session.log.calls[-1].finished.message["tool_calls"]
    assert call["function"]["name"] == "bash"
    assert json.loads(call["function"]["arguments"])["cmd"] in ("ls", "pwd")
    assert session.post(asked | {"messages": [user("and now freely")], "max_tokens": 20}).status_code == 200
    _, log = session.end()
    assert [call.opened.constrained for call in log.calls] == [True, True, False]
    built = session.build()
    assert built.tokens.excluded == {"constrained": len(log.calls[0].ids) + len(log.calls[1].ids)}
    assert built.tokens.trainable == len(log.calls[2].ids)


def text_of(answered: httpx.Response, stream: bool) -> str:
    assert answered.status_code == 200, answered.text
    if not stream:
        return answered.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answered.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events if event["choices"])
