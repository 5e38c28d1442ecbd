"""What the bridge costs between a finished task and the trainer's batch: results → samples → shaped rewards, beside the
floor of decoding the same bytes and turning their arrays into lists once.

Sessions have 16,000 tokens, a fifth of them sampled, and messages of four letters a token; groups are of eight. The
larger sizes show that both are linear; then the largest once more with its sessions cut into more traces. Times are
seconds of one CPU, the best of several runs; peak bytes are a token's, of the smallest size.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import tracemalloc
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from polar.codec import from_msgpack, to_msgpack
from polar.records import SessionResult, SessionStatus, TaskResult, TaskState, Trace, Trajectory
from slime_bridge.acceptance import Group, judge
from slime_bridge.fitting import ConversionRules
from slime_bridge.reward_post_process import post_process_rewards
from slime_bridge.slime_types import Sample

TOKENS = (1_000_000, 2_000_000, 4_000_000)
TRACES = (4, 32)
"""of a session, beside one"""
SESSION, GROUP, MESSAGE = 16_000, 8, 400
"""tokens of a session, sessions of a group, tokens of a message"""
RUNS = 3
ARGS = SimpleNamespace(advantage_estimator="grpo")


def bodies_of(tokens: int, traces: int) -> list[bytes]:
    """The callbacks' bodies, one a group."""
    source = np.random.default_rng(0)
    return [to_msgpack(task_result(f"task-{number}", traces, source)) for number in range(tokens // SESSION // GROUP)]


def task_result(task_id: str, traces: int, source: np.random.Generator) -> TaskResult:
    results = [
        SessionResult(
            session_id=f"{task_id}-{index}",
            task_id=task_id,
            status=SessionStatus.COMPLETED,
            trajectory=Trajectory(
                status=SessionStatus.COMPLETED,
                traces=[trace_of(SESSION // traces, float(index % 2), source) for _ in range(traces)],
                metadata={"tokens": {"sampled": SESSION // 5, "trainable": SESSION // 5, "excluded": {}}, "calls": {}},
            ),
            metadata={"session_index": index, "termination": "done", "attempt": 1},
        )
        for index in range(GROUP)
    ]
    return TaskResult(task_id=task_id, status=TaskState.COMPLETED, results=results)


def trace_of(tokens: int, reward: float, source: np.random.Generator) -> Trace:
    prompt = tokens // 4
    mask = source.random(tokens - prompt) < tokens / 5 / (tokens - prompt)
    return Trace(
        prompt_ids=source.integers(0, 150_000, prompt),
        response_ids=source.integers(0, 150_000, tokens - prompt),
        loss_mask=mask,
        prompt_messages=[{"role": "user", "content": "word" * prompt}],
        response_messages=[
            {"role": ("assistant", "tool")[number % 2], "content": "word" * MESSAGE}
            for number in range(-(-(tokens - prompt) // MESSAGE))
        ],
        finish_reason="stop",
        response_logprobs=np.where(mask, -source.random(len(mask)), 0.0),
        reward=reward,
        weight_versions=[(0, tokens - prompt, "1")],
    )


def floor(bodies: list[bytes]) -> list[Any]:
    return [
        [array.tolist() for array in (trace.prompt_ids, trace.response_ids, trace.loss_mask, trace.response_logprobs)]
        for body in bodies
        for session in from_msgpack(body, TaskResult).results
        for trace in session.trajectory.traces
    ]


def bridge(bodies: list[bytes]) -> tuple[list[Any], list[float]]:
    samples: list[Any] = []
    for number, body in enumerate(bodies):
        source = [Sample(group_index=number, index=number * GROUP + index) for index in range(GROUP)]
        group = judge(from_msgpack(body, TaskResult), source, ConversionRules(), submitted=0, min_fraction=0.0)
        assert isinstance(group, Group)
        samples += [sample for traces in group.samples for sample in traces]
    return samples, post_process_rewards(ARGS, samples)[1]


def seconds(work: Callable[[list[bytes]], Any], bodies: list[bytes]) -> float:
    times = []
    for _ in range(RUNS):
        gc.collect()
        began = time.process_time()
        work(bodies)
        times.append(time.process_time() - began)
    return min(times)


def peak(work: Callable[[list[bytes]], Any], bodies: list[bytes]) -> int:
    tracemalloc.start()
    work(bodies)
    found = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return found


def measure(tokens: int, traces: int) -> dict[str, Any]:
    bodies = bodies_of(tokens, traces)
    tokens = len(bodies) * GROUP * SESSION
    ours, least = seconds(bridge, bodies), seconds(floor, bodies)
    few = bodies[: TOKENS[0] // SESSION // GROUP]
    traced = len(few) * GROUP * SESSION
    ours_peak, least_peak = peak(bridge, few), peak(floor, few)
    return {
        "tokens": tokens,
        "traces_per_session": traces,
        "seconds": round(ours, 3),
        "floor_seconds": round(least, 3),
        "to_floor": round(ours / least, 2),
        "microseconds_per_thousand_tokens": round(ours / tokens * 1e9),
        "peak_bytes_per_token": round(ours_peak / traced, 1),
        "floor_peak_bytes_per_token": round(least_peak / traced, 1),
        "peak_to_floor": round(ours_peak / least_peak, 2),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    found = [measure(tokens, 1) for tokens in TOKENS] + [measure(TOKENS[-1], traces) for traces in TRACES]
    if arguments.json:
        print(json.dumps({"rows": found}))
        return
    for row in found:
        print(f"{row['tokens']:>9,} tokens, traces a session {row['traces_per_session']:>2}:", end=" ")
        print(f"{row['seconds']:.3f} s, {row['to_floor']} × floor ({row['floor_seconds']:.3f} s);", end=" ")
        print(f"{row['peak_bytes_per_token']} bytes a token at peak, {row['peak_to_floor']} × floor")


if __name__ == "__main__":
    main()
