"""Why nothing of a group can be trained, in words that name the cause and what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from polar.records import TaskResult, Termination, Trace
from slime_bridge.adapter import ConvertedSession, ending_of, is_trained
from slime_bridge.fitting import ConversionRules, Unused
from slime_bridge.shaping import LARGEST_REWARD, finite

OVERLONG = "every trace is longer than"
MASKED = "ending is masked"


def why_untrained(result: TaskResult, sessions: Sequence[ConvertedSession], rules: ConversionRules) -> str:
    """The sessions' causes, the most frequent first, and what one of them told."""
    causes = Counter(_cause(session, rules) for session in sessions)
    told = first_error(result)
    if set(causes) == {OVERLONG}:
        return _overlong(sessions, rules)
    counted = "; ".join(f"{_in_full(cause, rules)} ×{count}" for cause, count in causes.most_common())
    return f"no session has a token to train: {counted}" + (f" ({told})" if told else "")


def first_error(result: TaskResult) -> str:
    """One session's own words; they say more than a count."""
    told = (
        f"session {each.session_id} ended as {each.metadata.get('termination', each.status.value)}: {each.error}"
        for each in result.results
        if each.error
    )
    return next(told, "")


def _cause(session: ConvertedSession, rules: ConversionRules) -> str:
    if session.result is None:
        return "never came back"
    ending, traces = ending_of(session.result), _traces(session)
    if not is_trained(ending, rules):
        named = session.result.metadata.get("termination", session.result.status.value)
        return f"{MASKED}: {named}"
    if not traces:
        return "no trace: no call to the model was recorded"
    unusable = [trace.reward for trace in traces if finite(trace.reward) is None]
    if unusable:
        return _of_reward(unusable[0])
    overlong = session.dropped_traces[Unused.OVERLONG.value]
    if overlong == len(traces):
        return OVERLONG
    other = f", but for {overlong} traces over polar_max_trajectory_tokens = {rules.max_tokens}" if overlong else ""
    return f"no token of it is trainable{other}"


def _of_reward(reward: object) -> str:
    if reward is None:
        return "no reward: the evaluator gave none"
    return f"its reward {reward!r} is no number a trainer can use (finite, at most {LARGEST_REWARD:g})"


def _in_full(cause: str, rules: ConversionRules) -> str:
    if cause == OVERLONG:
        return f"{OVERLONG} polar_max_trajectory_tokens = {rules.max_tokens}"
    return f"{cause} (polar_timeout_policy)" if cause.endswith(Termination.AGENT_TIMEOUT.value) else cause


def _overlong(sessions: Sequence[ConvertedSession], rules: ConversionRules) -> str:
    shortest = min(len(each.prompt_ids) + len(each.response_ids) for one in sessions for each in _traces(one))
    clip = "" if rules.overlong == "clip" else ", or polar_overlong: clip"
    return (
        f"{OVERLONG} polar_max_trajectory_tokens = {rules.max_tokens} (the shortest has {shortest}): "
        f"raise --max-tokens-per-gpu{clip}"
    )


def _traces(session: ConvertedSession) -> list[Trace]:
    trajectory = session.result.trajectory if session.result is not None else None
    return trajectory.traces if trajectory is not None else []
