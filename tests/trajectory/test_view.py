"""What `polar show` is told of each call."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from hypothesis import given, settings

from peers.random_sessions import RandomSession, random_sessions
from peers.session_logs import ScriptedLog, common
from polar.requests import StrategySpec
from polar.sessionlog import SessionLog
from polar.trajectory import BUILDERS, load_builder
from polar.trajectory.view import Fork, Turn, turns


def view(log: SessionLog, strategy: str = "prefix_merging") -> list[Turn]:
    return turns(log, load_builder(StrategySpec(strategy=strategy)).build(log))


def test_a_turn_tells_what_was_new_and_where_it_is_trained(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1, 2], [10, 9])
    script.call([1, 2, 10, 9, 3], [11, 9], after=first, source="continued", version="5")
    _, second = view(script.read())
    assert (second.call, second.dialect, second.model, second.source) == (2, "openai_chat", "policy", "continued")
    assert (second.prompt_length, second.kept, second.continues) == (5, 4, 1)
    assert (second.new_ids.tolist(), second.ids.tolist()) == ([3], [11, 9])
    assert (second.trace, second.loss_mask.tolist(), second.excluded, second.fork) == (0, [1, 1], None, None)
    assert (second.logprobs.tolist(), second.versions) == ([-0.5, -0.75], [(0, 2, "5")])
    assert (second.opened_at, second.finished_at, second.delivered) == (1.0, 2.0, True)


def test_a_fork_names_the_first_differing_token(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1], [50, 51, 9])
    script.call([1, 50, 77, 9, 2], [60], after=first, source="engine")
    script.call([1, 50], [61], after=first)
    _, drifted, shortened = view(script.read())
    assert drifted.fork == Fork(expected_call=1, position=2, expected_id=51, prompt_id=77)
    assert drifted.new_ids.tolist() == [77, 9, 2]
    assert shortened.fork == Fork(expected_call=1, position=2, expected_id=51, prompt_id=None)


def test_a_call_that_continues_no_answer_tells_where_it_leaves_the_one_it_begins_like(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    first = script.call([1, 2, 3], [50, 9])
    script.call([1, 2, 7], [60, 9], like=first)
    script.call([8], [61, 9])
    _, edited, other = view(script.read())
    assert edited.leaves == Fork(expected_call=1, position=2, expected_id=3, prompt_id=7)
    assert (edited.fork, edited.continues, other.leaves) == (None, None, None)


def test_an_excluded_call_says_why(tmp_path: Path) -> None:
    script = ScriptedLog(tmp_path)
    script.call([1], [10], delivered=False)
    script.call([2], [11], auxiliary=True, logprobs=None)
    script.call([3], [12], finish=None, delivered=False)
    seen = view(script.read())
    assert [turn.excluded for turn in seen] == ["undelivered", "auxiliary_call", "aborted"]
    assert [turn.loss_mask.tolist() for turn in seen] == [[0], [0], [0]]
    assert np.isnan(seen[1].logprobs).all()


@settings(max_examples=200)
@given(session=random_sessions)
def test_the_view_agrees_with_the_result(tmp_path_factory, session: RandomSession) -> None:
    log, truth = session.write(tmp_path_factory.getbasetemp())
    for strategy in BUILDERS:
        result = load_builder(StrategySpec(strategy=strategy)).build(log)
        seen = turns(log, result)
        assert sum(int(turn.loss_mask.sum()) for turn in seen) == result.tokens.trainable
        excluded = [turn for turn in seen if turn.excluded is not None]
        assert sum(len(turn.ids) for turn in excluded) == sum(result.tokens.excluded.values())
        assert {turn.excluded for turn in excluded} == set(result.tokens.excluded)
        for turn, call in zip(seen, truth.calls, strict=True):
            prompt = call.prompt or []
            assert turn.new_ids.tolist() == prompt[turn.kept :]
            if turn.continues is not None:
                sequence = truth.call(turn.continues).sequence
                assert turn.kept == common(prompt, sequence)
                assert (turn.fork is None) == (turn.kept == len(sequence))
                if turn.fork is not None:
                    assert turn.fork.expected_id == sequence[turn.kept]
