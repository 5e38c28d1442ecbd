"""What building a trajectory costs beside its floor: reading the log and putting its arrays together once.

The session: 200 turns, 60,000 tokens, a fifth of them sampled, streamed in chunks of 8. Times are the best of several
runs; peak bytes are what a build holds at most beyond the log itself, a token of the session.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from polar.requests import StrategySpec
from polar.sessionlog import Chunk, Delivered, Finished, Header, LogWriter, Opened, Prompt, SessionLog, read
from polar.trajectory import BUILDERS, load_builder

TURNS, CONTEXT, SAMPLED, CHUNK = 200, 240, 60, 8
TOKENS = TURNS * (CONTEXT + SAMPLED)
RUNS = 7


def write_session(path: Path) -> None:
    source = np.random.default_rng(0)
    with LogWriter(path, Header(session_id="s", task_id="t", attempt=1, model="policy", created_at=0.0)) as writer:
        for number in range(1, TURNS + 1):
            write_turn(writer, number, source)
        writer.seal()


def write_turn(writer: LogWriter, number: int, source: np.random.Generator) -> None:
    base = number - 1 or None
    keep = (number - 1) * (CONTEXT + SAMPLED)
    question = {"role": "tool", "content": f"result {number}"}
    writer.append(
        Opened(
            call=number,
            at=0.0,
            dialect="openai_chat",
            body=b"",
            model="policy",
            messages_base=base,
            messages_keep=2 * (number - 1),
            messages=[question],
        )
    )
    ids = source.integers(0, 150_000, CONTEXT)
    writer.append(Prompt(call=number, base=base, keep=keep, ids=ids, source="continued", expected=base))
    for start in range(0, SAMPLED, CHUNK):
        length = min(CHUNK, SAMPLED - start)
        ids, logprobs = source.integers(0, 150_000, length), -source.random(length)
        writer.append(Chunk(call=number, ids=ids, logprobs=logprobs, version="1"))
    answer = {"role": "assistant", "content": f"answer {number}"}
    writer.append(Finished(call=number, at=0.0, finish_reason="stop", message=answer))
    writer.append(Delivered(call=number, at=0.0))


def concatenate(log: SessionLog) -> tuple[np.ndarray, np.ndarray]:
    ids = [part for call in log.calls if call.prompt for part in (call.prompt.ids, call.ids)]
    return np.concatenate(ids), np.concatenate([call.logprobs for call in log.calls if call.logprobs is not None])


def best_seconds(work: Callable[[], Any]) -> float:
    times = []
    for _ in range(RUNS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(work: Callable[[], Any]) -> int:
    tracemalloc.start()
    work()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def measure(path: Path) -> dict[str, Any]:
    log = read(path)
    floor = best_seconds(lambda: concatenate(read(path)))
    builders = {}
    for name in BUILDERS:
        builder = load_builder(StrategySpec(strategy=name))

        def build(builder: Any = builder) -> Any:
            return builder.build(log)

        seconds = best_seconds(build)
        builders[name] = {
            "milliseconds": round(seconds * 1000, 2),
            "build_to_floor": round(seconds / floor, 2),
            "read_and_build_to_floor": round((floor + seconds) / floor, 2),
            "peak_bytes_per_token": round(peak_bytes(build) / TOKENS, 1),
        }
    return {
        "turns": TURNS,
        "tokens": TOKENS,
        "log_bytes_per_token": round(path.stat().st_size / TOKENS, 1),
        "floor": {
            "milliseconds": round(floor * 1000, 2),
            "peak_bytes_per_token": round(peak_bytes(lambda: concatenate(read(path))) / TOKENS, 1),
        },
        "builders": builders,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "session.log"
        write_session(path)
        found = measure(path)
    if arguments.json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{TURNS} turns, {TOKENS:,} tokens; {found['log_bytes_per_token']} bytes a token in the log")
    print(f"{'floor (read, concatenate)':28}{found['floor']['milliseconds']:8} ms", end="")
    print(f"{'':14}{found['floor']['peak_bytes_per_token']:8} bytes a token at peak")
    for name, row in found["builders"].items():
        print(f"{name:28}{row['milliseconds']:8} ms{row['build_to_floor']:8} × floor", end="")
        print(f"{row['peak_bytes_per_token']:6} bytes a token at peak")


if __name__ == "__main__":
    main()
