"""Laws 1 to 3 over random session trees, each written to a real file and read back."""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peers.random_sessions import RandomSession, TrueSession, draw_session, random_sessions
from polar.codec import from_msgpack, to_builtins, to_msgpack
from polar.records import BuildResult, Trace
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog
from polar.trajectory import BUILDERS, load_builder
from polar.trajectory.audit import audit
from trajectory import brute_force


def build(log: SessionLog, strategy: str, include_auxiliary: bool = False) -> BuildResult:
    return load_builder(StrategySpec(strategy=strategy)).build(log, include_auxiliary=include_auxiliary)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as name:
        yield Path(name)


@settings(max_examples=600)
@given(session=random_sessions, include_auxiliary=st.booleans())
def test_every_builder_keeps_the_laws(folder: Path, session: RandomSession, include_auxiliary: bool) -> None:
    check_builders(folder, session, include_auxiliary)


@pytest.mark.slow
@settings(max_examples=4000)
@given(session=random_sessions, include_auxiliary=st.booleans())
def test_every_builder_keeps_the_laws_for_long(folder: Path, session: RandomSession, include_auxiliary: bool) -> None:
    check_builders(folder, session, include_auxiliary)


def check_builders(folder: Path, session: RandomSession, include_auxiliary: bool) -> None:
    log, truth = session.write(folder)
    excluded = brute_force.exclusions(truth, include_auxiliary)
    trainable = [call.number for call in truth.calls if call.sampled and call.number not in excluded]
    expected_chains = {
        "prefix_merging": brute_force.merged(truth, trainable),
        "per_request": [[number] for number in trainable],
    }
    for strategy, chains in expected_chains.items():
        result = build(log, strategy, include_auxiliary)
        assert [trace.metadata["calls"] for trace in result.traces] == chains
        check_conservation(truth, result, excluded)
        for trace in result.traces:
            check_context(truth, trace)
            check_alignment(truth, trace)
            check_messages(truth, trace)
        assert to_builtins(result.calls) == brute_force.counts(truth)


def check_conservation(truth: TrueSession, result: BuildResult, excluded: dict[int, str]) -> None:
    tokens: Counter[str] = Counter()
    for number, reason in excluded.items():
        tokens[reason] += len(truth.call(number).sampled)
    assert result.tokens.excluded == dict(tokens)
    assert result.tokens.sampled == sum(len(call.sampled) for call in truth.calls)
    assert result.tokens.trainable == sum(trace.trainable for trace in result.traces)
    assert result.tokens.balanced
    trained = [number for trace in result.traces for number in trace.metadata["calls"]]
    assert len(trained) == len(set(trained))
    assert set(trained).isdisjoint(excluded)


def check_context(truth: TrueSession, trace: Trace) -> None:
    ids = trace.prompt_ids.tolist() + trace.response_ids.tolist()
    start = len(trace.prompt_ids)
    masked = np.zeros(len(trace.response_ids), bool)
    assert [turn[2] for turn in trace.metadata["turns"]] == trace.metadata["calls"]
    for first, end, number in trace.metadata["turns"]:
        call = truth.call(number)
        assert ids[: start + first] == call.prompt
        assert ids[start + first : start + end] == call.sampled
        masked[first:end] = True
    assert trace.loss_mask.tolist() == masked.tolist()


def check_alignment(truth: TrueSession, trace: Trace) -> None:
    calls = [truth.call(number) for number in trace.metadata["calls"]]
    assert all(brute_force.usable(call) for call in calls[:-1])
    logprobs = [0.0] * len(trace.response_ids)
    versions: list[str | None] = [None] * len(trace.response_ids)
    for call, (start, end, _) in zip(calls, trace.metadata["turns"], strict=True):
        logprobs[start:end] = call.logprobs
        versions[start:end] = call.versions
    if brute_force.usable(calls[-1]):
        assert trace.response_logprobs is not None
        assert trace.response_logprobs.tolist() == logprobs
    else:
        assert trace.response_logprobs is None
    told: list[str | None] = [None] * len(trace.response_ids)
    for start, end, version in trace.weight_versions:
        assert told[start:end] == [None] * (end - start)
        told[start:end] = [version] * (end - start)
    assert told == versions


def check_messages(truth: TrueSession, trace: Trace) -> None:
    first, last = truth.call(trace.metadata["calls"][0]), truth.call(trace.metadata["calls"][-1])
    assert trace.prompt_messages == first.messages
    answer = [last.answer] if last.answer else []
    assert trace.response_messages == (last.messages[len(first.messages) :] if last is not first else []) + answer
    assert trace.tools == first.tools
    assert trace.finish_reason == last.finish


@settings(max_examples=200)
@given(session=random_sessions)
def test_the_same_log_gives_the_same_bytes(folder: Path, session: RandomSession) -> None:
    (one, _), (other, _) = session.write(folder), session.write(folder)
    for strategy in BUILDERS:
        packed = to_msgpack(build(one, strategy))
        assert packed == to_msgpack(build(one, strategy))
        assert packed == to_msgpack(build(other, strategy))
        audit(one, from_msgpack(packed, BuildResult))


def test_random_sessions_show_every_kind_of_trouble(folder: Path) -> None:
    seen: Counter[str] = Counter()
    source = random.Random(1)
    for _ in range(500):
        log, truth = draw_session(source.randbytes(400)).write(folder)
        result = build(log, "prefix_merging")
        seen.update({name: value > 0 for name, value in msgspec.structs.asdict(result.calls).items()})
        seen.update(dict.fromkeys(result.tokens.excluded, True))
        lengths = [len(trace.metadata["calls"]) for trace in result.traces]
        seen["merged"] += max(lengths, default=0) > 2
        seen["torn"] += log.torn
        seen["no logprobs"] += any(trace.response_logprobs is None for trace in result.traces)
        seen["versions"] += any(len(call.spans) > 1 for call in log.calls)
        seen["empty answer"] += any(not call.sampled and call.finish == "stop" for call in truth.calls)
        seen["siblings"] += len({str(call.prompt) for call in truth.calls}) < len(truth.calls)
    kinds = ["continued", "rendered", "forks", "drift", "joined", "refused", "missing_logprobs", "merged", "torn"]
    kinds += ["no logprobs", "versions", "empty answer", "siblings", "auxiliary_call", "undelivered", "aborted"]
    kinds += ["over_limit", "unknown_context", "constrained", "images"]
    assert {kind: seen[kind] for kind in kinds if seen[kind] < 12} == {}
