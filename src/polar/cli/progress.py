"""A run's tasks as they stand: each is asked for until it is over, and its results are fetched once. A server that is
away for a while (a restart) loses nothing, so it is asked again before anything is given up."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable

import msgspec

from polar.cli.reasons import untrained
from polar.cli.results import mean, reward, tokens
from polar.client import Client, ClientError
from polar.records import TaskState, TaskStatus, TaskSummary
from polar.requests import TaskRequest

LOOK_SECONDS = 0.5
AWAY_SECONDS = 60.0
_LISTED = 1000


class Row(msgspec.Struct, kw_only=True):
    """What the table shows of one task; tokens are known once it is over."""

    task_id: str
    status: str = "submitting"
    sessions: int
    done: int = 0
    mean_reward: float | None = None
    traces: float | None = None
    sampled: int | None = None
    trainable: int | None = None
    untrained: dict[str, int] = {}
    """how many sessions will not be trained, by what they ended as"""
    waiting_for: str | None = None
    error: str | None = None


class Run:
    """`results` has each task that is over, with its sessions' results."""

    def __init__(self, client: Client, tasks: Iterable[tuple[str, int]]) -> None:
        """`tasks`: id and number of sessions."""
        self.rows = {task_id: Row(task_id=task_id, sessions=sessions) for task_id, sessions in tasks}
        self.results: dict[str, TaskStatus] = {}
        self._client = client
        self._sent: list[str] = []
        self._away_since: float | None = None

    @property
    def away(self) -> bool:
        """The server did not answer when it was last asked."""
        return self._away_since is not None

    @property
    def unfinished(self) -> list[str]:
        return [task_id for task_id in self.rows if task_id not in self.results]

    @property
    def failed(self) -> bool:
        return any(known.status is not TaskState.COMPLETED for known in self.results.values())

    def look(self) -> list[Row]:
        """Asks once; returns the rows of tasks that are over since the last look. Raises ClientError when the server
        has been away for AWAY_SECONDS."""
        try:
            return self._look()
        except ClientError as error:
            now = time.monotonic()
            self._away_since = self._away_since or now
            if error.status is not None or now - self._away_since > AWAY_SECONDS:
                raise
            return []

    def _look(self) -> list[Row]:
        summaries = {row.task_id: row for row in self._client.tasks(limit=_LISTED).tasks}
        self._away_since = None
        over = [task_id for task_id in self.unfinished if self._note(task_id, summaries.get(task_id)).terminal]
        for task_id in over:
            self._finish(self._client.task(task_id))
        for task_id in self.unfinished[:1]:
            self.rows[task_id].waiting_for = self._client.task(task_id, results=False).waiting_for
        return [self.rows[task_id] for task_id in over]

    def _note(self, task_id: str, summary: TaskSummary | None) -> TaskState:
        row = self.rows[task_id]
        if summary is None:
            known = self._client.task(task_id, results=False)
            row.status, row.done = known.status, known.completed_sessions
            return known.status
        row.status, row.done = summary.status, summary.completed_sessions
        row.mean_reward, row.traces = summary.mean_reward, summary.mean_traces
        return summary.status

    def _finish(self, known: TaskStatus) -> None:
        self.results[known.task_id] = known
        row = self.rows[known.task_id]
        ledgers = [tokens(result) for result in known.results]
        row.status, row.done, row.error, row.waiting_for = known.status, known.completed_sessions, known.error, None
        row.mean_reward = mean(reward(result) for result in known.results)
        row.traces = mean(len(result.trajectory.traces) for result in known.results if result.trajectory)
        row.sampled = sum(ledger.get("sampled", 0) for ledger in ledgers)
        row.trainable = sum(ledger.get("trainable", 0) for ledger in ledgers)
        row.untrained = dict(Counter(why for result in known.results if (why := untrained(result))))

    def submit(self, tasks: Iterable[TaskRequest]) -> int:
        """How many of them were over before. Raises ClientError, naming the task."""
        over = 0
        for task in tasks:
            self._sent.append(task.task_id)
            try:
                over += self._client.submit(task).status.terminal
            except ClientError as error:
                if error.status is not None:
                    self._sent.remove(task.task_id)
                raise ClientError(f"task {task.task_id}: {error.message}", error.status) from error
        return over

    def cancel(self) -> int:
        """Cancels what was sent and is not over, also a submit whose answer has not come; forgets the rest.
        Returns how many."""
        self.rows = {task_id: self.rows[task_id] for task_id in self._sent}
        for task_id in self.unfinished:
            self._client.cancel(task_id, register_if_missing=True)
        return len(self.unfinished)

    def follow(self, seen: Callable[[list[Row]], None]) -> None:
        """Until every task is over; `seen` is called after each look."""
        while self.unfinished:
            seen(self.look())
            if self.unfinished:
                time.sleep(LOOK_SECONDS)
