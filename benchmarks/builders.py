"""What building a trajectory costs beside its floor: reading the log and putting its arrays together once.

The session: 200 turns, 60,000 tokens, a fifth of them sampled, streamed in chunks of 8. Times are the best of several
runs; peak bytes are what a build holds at most beyond the log itself, a token of the session. Then sessions of 128,000
tokens in 10 to 500 turns, in tokens a second beside copying the same arrays: a build is linear in both.
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

TURNS, CHUNK, RUNS = 200, 8, 7
TOKENS, LONG = 60_000, 128_000
GROWTH = (10, 50, 200, 500)
"""turns"""


def write_session(path: Path, turns: int, tokens: int) -> None:
    """A fifth of the tokens is sampled."""
    source = np.random.default_rng(0)
    each, sampled = tokens // turns, tokens // turns // 5
    with LogWriter(path, Header(session_id="s", task_id="t", attempt=1, model="policy", created_at=0.0)) as writer:
        for number in range(1, turns + 1):
            write_turn(writer, number, source, each - sampled, sampled)
        writer.seal()


def write_turn(writer: LogWriter, number: int, source: np.random.Generator, context: int, sampled: int) -> None:
    base = number - 1 or None
    keep = (number - 1) * (context + sampled)
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
    ids = source.integers(0, 150_000, context)
    writer.append(Prompt(call=number, base=base, keep=keep, ids=ids, source="continued", expected=base))
    for start in range(0, sampled, CHUNK):
        length = min(CHUNK, sampled - start)
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


def growth(folder: Path) -> dict[int, Any]:
    """Millions of tokens a second by turns of a session: of those in the traces, which repeat the history where each
    request is a trace of its own."""
    found = {}
    for turns in GROWTH:
        path = folder / f"{turns}.log"
        write_session(path, turns, LONG)
        log = read(path)
        rates = {"copy": LONG / best_seconds(copying())}
        for name in BUILDERS:
            build = building(name, log)
            tokens = sum(len(trace.prompt_ids) + len(trace.response_ids) for trace in build().traces)
            rates[name] = tokens / best_seconds(build)
        found[turns] = {name: round(rate / 1e6, 1) for name, rate in rates.items()}
    return found


def building(name: str, log: SessionLog) -> Callable[[], Any]:
    builder = load_builder(StrategySpec(strategy=name))
    return lambda: builder.build(log)


def copying() -> Callable[[], Any]:
    """A copy of the arrays that a trace of the whole session has: ids, logprobs and mask."""
    ids, logprobs, mask = np.zeros(LONG, np.int32), np.zeros(LONG, np.float32), np.zeros(LONG, np.uint8)
    return lambda: (ids.copy(), logprobs.copy(), mask.copy())


def measure(path: Path) -> dict[str, Any]:
    log = read(path)
    floor = best_seconds(lambda: concatenate(read(path)))
    builders = {}
    for name in BUILDERS:
        build = building(name, log)
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
        write_session(path, TURNS, TOKENS)
        found = measure(path) | {"growth": growth(Path(folder))}
    if arguments.json:
        print(msgspec.json.encode(found).decode())
        return
    print(f"{TURNS} turns, {TOKENS:,} tokens; {found['log_bytes_per_token']} bytes a token in the log")
    print(f"{'floor (read, concatenate)':28}{found['floor']['milliseconds']:8} ms", end="")
    print(f"{'':14}{found['floor']['peak_bytes_per_token']:8} bytes a token at peak")
    for name, row in found["builders"].items():
        print(f"{name:28}{row['milliseconds']:8} ms{row['build_to_floor']:8} × floor", end="")
        print(f"{row['peak_bytes_per_token']:6} bytes a token at peak")
    print(f"{LONG:,} tokens, millions a second by turns")
    for turns, row in found["growth"].items():
        print(f"{turns:8} turns" + "".join(f"{name:>18}{rate:8}" for name, rate in row.items()))


if __name__ == "__main__":
    main()
