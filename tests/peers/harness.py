"""The scripted harness: a program in a sandbox that does what its script says, step by step, and says what it met.

Run inside as `python harness.py STEPS` with STEPS a JSON list of [verb, argument]; see VERBS. It talks to its model
with the standard library alone. `scripted(...)` makes the fields of a TaskRequest that run it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

MESSAGES: list[dict[str, Any]] = []
HEARD: list[str] = []
"""named pipes that are told each answer before anything else happens"""


def post(path: str, body: bytes) -> tuple[int, bytes]:
    """Status and body of the answer. By hand: urllib takes longer to import than all the rest of a short session."""
    _, _, address, root = os.environ["OPENAI_BASE_URL"].split("/", 3)
    host, port = address.split(":")
    headers = [
        f"POST /{root}{path} HTTP/1.1",
        f"Host: {address}",
        f"Authorization: Bearer {os.environ['OPENAI_API_KEY']}",
        "Content-Type: application/json",
        f"Content-Length: {len(body)}",
        "Connection: close",
    ]
    with socket.create_connection((host, int(port))) as line:
        line.sendall("\r\n".join([*headers, "", ""]).encode() + body)
        answer = b"".join(iter(lambda: line.recv(1 << 16), b""))
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), content


def call(text: str, messages: list[dict[str, Any]] = MESSAGES) -> None:
    """One completion; the conversation goes on from the last one. Prints the answer, or the error's status."""
    messages.append({"role": "user", "content": text})
    status, answer = post("/chat/completions", json.dumps({"model": "policy", "messages": messages}).encode())
    if status != 200:
        print(f"HTTP {status}: {answer.decode()}", flush=True)
        return
    message = json.loads(answer)["choices"][0]["message"]
    messages.append(message)
    for pipe in HEARD:
        with open(pipe, "w") as told:
            told.write(f"{message['content']}\n")
    print(f"model: {message['content']}", flush=True)


def stream(text: str) -> None:
    """One streamed completion that goes on from nothing and is listened to until its end."""
    asked = {"model": "policy", "stream": True, "messages": [{"role": "user", "content": text}]}
    post("/chat/completions", json.dumps(asked).encode())


def agents(raising: int) -> None:
    """Four agents at once, each with a conversation of its own of two calls; number `raising` raises after its first,
    and the harness after the others' end."""

    from concurrent.futures import ThreadPoolExecutor

    def agent(number: int) -> None:
        conversation: list[dict[str, Any]] = []
        call(f"agent {number} begins", conversation)
        if number == raising:
            raise RuntimeError(f"agent {number} is lost")
        call(f"agent {number} goes on", conversation)

    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(agent, number) for number in range(1, 5)]
    for each in running:
        each.result()


def fill(path: str) -> None:
    """Writes until the disk is full to the last byte."""
    with open(os.path.expandvars(path), "wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            with contextlib.suppress(OSError):
                while True:
                    file.write(b"x" * size)


def forget(count: int) -> None:
    """Drops the last messages, as a harness does that makes room."""
    del MESSAGES[-count:]


def say(text: str) -> None:
    print(text, flush=True)


def hear(pipe: str) -> None:
    """From now on each answer is written into this named pipe as soon as it is there."""
    HEARD.append(pipe)


def leave(code: int) -> None:
    sys.exit(code)


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def sleep_unless_first(count: int) -> None:
    """Sleeps for ever in all but `count` sessions of a group: an id ends in -s<index>-<random>."""
    index = int(os.environ["SESSION_ID"].rsplit("-s", 1)[1].split("-")[0])
    time.sleep(0 if index < count else 600)


def deaf(_: None) -> None:
    """From now on only a kill ends this process."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def daemon(seconds: float) -> None:
    """Leaves a process behind that no longer belongs to any session or process group of ours."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(seconds)
        os._exit(0)
    os.wait()


def shout(megabytes: int) -> None:
    block = ("x" * 1023 + "\n") * 1024
    for _ in range(megabytes):
        sys.stdout.write(block)


def eat(megabytes: int) -> None:
    kept = [bytearray(os.urandom(1) * (1 << 20)) for _ in range(megabytes)]
    print(f"ate {len(kept)}", flush=True)


def write(path: str) -> None:
    Path(os.path.expandvars(path)).write_text("written by the harness\n")


def tell(path: str) -> None:
    print(Path(os.path.expandvars(path)).stat().st_size, flush=True)


VERBS = {
    "agents": agents,
    "call": call,
    "daemon": daemon,
    "deaf": deaf,
    "eat": eat,
    "exit": leave,
    "fill": fill,
    "forget": forget,
    "hear": hear,
    "say": say,
    "shout": shout,
    "sleep": sleep,
    "sleep_unless_first": sleep_unless_first,
    "stream": stream,
    "tell": tell,
    "write": write,
}


def scripted(*steps: tuple[str, Any], **runtime: Any) -> dict[str, Any]:
    """agent and runtime of a task whose harness does these steps in a bubblewrap sandbox with this Python."""
    command = shlex.join([str(Path(sys.executable).resolve()), "-I", "-S", "/session/harness.py", json.dumps(steps)])
    upload = {"type": "upload_file", "content": Path(__file__).read_text(), "target": "/session/harness.py"}
    prepare = [upload, *runtime.pop("prepare", [])]
    bind = [*runtime.pop("bind", []), *([sys.base_prefix] if sys.base_prefix != "/usr" else [])]
    kwargs = {"bind": bind} if bind else {}
    return {
        "agent": {"harness": "shell", "custom_shell": {"command": f"exec {command}"}},
        "runtime": {"prepare": prepare, "kwargs": kwargs} | runtime,
    }


if __name__ == "__main__":
    for verb, argument in json.loads(sys.argv[1]):
        VERBS[verb](argument)
