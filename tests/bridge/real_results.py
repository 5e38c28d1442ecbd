"""Random groups as a rollout server sends them: random session logs, built by the real builders, over the real wire."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from peers.random_sessions import RandomSession, random_sessions
from polar.codec import from_msgpack, to_msgpack
from polar.endings import TABLE
from polar.nodeapi import NodeResult
from polar.public import session_result
from polar.records import EvaluationResult, SessionResult, TaskResult, TaskState, Termination
from polar.requests import StrategySpec
from polar.trajectory import BUILDERS, load_builder

DONE = [TaskState.COMPLETED] * 8
GOOD = [Termination.DONE, Termination.LIMIT]
ENDINGS = [*GOOD * 8, *Termination, *GOOD * 8]
REWARDS = [*[0.0, 1.0, 0.25] * 4, None, float("nan"), float("inf"), *[1.0, -1.0, 0.0] * 4]
"""the usual ones at both ends, which hypothesis prefers"""


@dataclass
class Play:
    """One session: what it did, how it ended and was graded; None = it never came back."""

    log: RandomSession
    builder: str
    termination: Termination
    reward: float | None

    def result(self, index: int, folder: Path) -> SessionResult:
        ending = TABLE[self.termination]
        log, _ = self.log.write(folder)
        built = load_builder(StrategySpec(strategy=self.builder)).build(log)
        for trace in built.traces:
            trace.reward = self.reward
        if built.traces and ending.forced_finish is not None:
            built.traces[-1].finish_reason = ending.forced_finish
        node = NodeResult(
            session_id=f"session-{index}",
            attempt=1,
            node_id="node",
            epoch=1,
            status=ending.status,
            termination=self.termination,
            traces=built.traces if ending.builds else None,
            tokens=built.tokens if ending.builds else None,
            calls=built.calls if ending.builds else None,
            evaluation=EvaluationResult(outcome_reward=self.reward),
        )
        return session_result(node, "task", index)


PLAY = st.builds(
    Play, random_sessions, st.sampled_from(sorted(BUILDERS)), st.sampled_from(ENDINGS), st.sampled_from(REWARDS)
)


@st.composite
def task_results(draw: st.DrawFn, max_size: int = 4) -> tuple[TaskResult, int]:
    """A task's result with its sessions in any order, and the size of its group."""
    plays = draw(st.lists(PLAY | PLAY | PLAY | PLAY | st.none(), min_size=2, max_size=max_size))
    state = draw(st.sampled_from([*DONE, TaskState.FAILED, TaskState.CANCELLED, *DONE]))
    with tempfile.TemporaryDirectory() as folder:
        results = [play.result(index, Path(folder)) for index, play in enumerate(plays) if play is not None]
    draw(st.randoms()).shuffle(results)
    sent = to_msgpack(TaskResult(task_id="task", status=state, results=results))
    return from_msgpack(sent, TaskResult), len(plays)
