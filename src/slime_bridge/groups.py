"""Prompt groups on their way from the data source to the trainer: as many as admission allows, replaced when dropped.

Lives on one event loop. Every group that was taken is returned to the trainer, waits for its next call, or was dropped
under a name.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from polar.client import ClientError
from polar.errors import ConfigError, PolarError
from polar.records import Drop, TaskResult
from polar.requests import TaskRequest
from slime_bridge.acceptance import Dropped, Group, judge
from slime_bridge.admission import admit
from slime_bridge.config import PolarSlimeConfig, checked_request, task_payload
from slime_bridge.ledger import Ledger
from slime_bridge.metrics import SinceLastCall, train_metrics
from slime_bridge.staleness import Age, PolicyVersions
from slime_bridge.tasks import Tasks

log = logging.getLogger(__name__)
PROGRESS_SECONDS = 60.0
_WITH_A_DIGIT = re.compile(r"\w*\d\w*")
CLOSED = "the bridge's worker is closed"


class BridgeFault(PolarError):
    """The rollout cannot go on."""

    default_name = "bridge"


@dataclass(frozen=True)
class Collected:
    """What one call of the rollout function returns: groups in the data source's order, and its metrics."""

    groups: list[Group]
    metrics: dict[str, float]


@dataclass(frozen=True)
class Running:
    source: list[Any]
    task: asyncio.Task[None]


class Groups:
    def __init__(
        self, args: Any, config: PolarSlimeConfig, source: Any, tasks: Tasks, background: asyncio.TaskGroup, run_id: str
    ) -> None:
        self.args, self._config, self._source = args, config, source
        self._tasks, self._background, self._run_id = tasks, background, run_id
        self._in_flight: dict[int, Running] = {}
        self._late: dict[int, Running] = {}
        self._finished: list[Group] = []
        self._submitted = 0
        self._requested = 0
        self._rollout_id = 0
        self._version: str | None = None
        self._versions = PolicyVersions()
        self._trains = not getattr(args, "debug_rollout_only", False)
        self._ledger, self._since = Ledger(), SinceLastCall()
        self._drops_in_a_row: list[str] = []
        self._fault: PolarError | None = None
        self._end: Exception | None = None
        """a fault that ends the worker; a call may try again behind any other"""
        self._changed = asyncio.Event()

    async def collect(self, rollout_id: int, version: str | None) -> Collected:
        """Exactly rollout_batch_size accepted groups; `version` is the engine's. Raises BridgeFault, ConfigError."""
        self._rollout_id, self._version, self._requested = rollout_id, version, self._config.batch
        self._fault = None
        self._drops_in_a_row.clear()
        if version is not None:
            self._versions.seen(version, rollout_id)
        self._drop_stale()
        chosen: list[Group] = []
        try:
            while len(self._finished) < self._requested:
                self._admit()
                await self._change()
            chosen = self._oldest(self._config.batch)
            await self._between_calls()
        except asyncio.CancelledError:
            self._finished += chosen
            self.close()
            raise
        finally:
            self._requested = 0
        return self._hand_over(chosen)

    async def _between_calls(self) -> None:
        if self._runs_ahead:
            self._admit()
        else:
            await self._cancel_all()

    def _oldest(self, count: int) -> list[Group]:
        """In the data source's order; what came later waits for the next call."""
        in_order = sorted(self._finished, key=lambda group: group.index)
        self._finished = in_order[count:]
        return in_order[:count]

    @property
    def _runs_ahead(self) -> bool:
        """Not in the last rollout: nobody would ask for what is started ahead of it."""
        rollouts = getattr(self.args, "num_rollout", None)
        return self._config.prefetch and (rollouts is None or self._rollout_id + 1 < rollouts)

    def _admit(self) -> None:
        if self._end is not None:
            raise self._end
        count = admit(
            requested=self._requested,
            in_flight=len(self._in_flight),
            finished=len(self._finished),
            batch=self._config.batch,
            level=self._config.max_async_level,
            prefetch=self._runs_ahead,
        )
        if count == 0:
            return
        take: Callable[[int], list[list[Any]]] = getattr(self._source, "take", self._source.get_samples)
        groups = take(count)
        if len(groups) != count:
            raise ConfigError(f"data_source_path: it gave {len(groups)} of {count} prompt groups")
        for group in groups:
            self._start(group)

    def _start(self, source: list[Any]) -> None:
        number = self._submitted
        self._submitted += 1
        payload = task_payload(
            self.args,
            self._config,
            source,
            rollout_id=self._rollout_id,
            task_position=number,
            metadata={
                "group_id": source[0].group_index,
                "policy_version": self._version,
                "rollout_step": self._rollout_id,
                "run_id": self._run_id,
            },
        )
        payload["task_id"] += f"-{self._run_id}-{number}"
        request = checked_request(payload)
        task = self._background.create_task(self._run(number, source, request))
        self._in_flight[number] = Running(source, task)
        if self._config.straggler_deadline is not None:
            asyncio.get_running_loop().call_later(self._config.straggler_deadline, self._give_up, number)

    async def _run(self, number: int, source: list[Any], request: TaskRequest) -> None:
        try:
            await self._finish(number, source, request)
            if self._runs_ahead and self._fault is None:
                self._admit()
        except Exception as error:
            self._end = error
            self._changed.set()
            self._tasks.leave()  # the worker ends at once, and does not wait until the server has cancelled
            raise

    async def _finish(self, number: int, source: list[Any], request: TaskRequest) -> None:
        submitted = self._rollout_id
        try:
            self._settle(source, await self._tasks.run(request), submitted)
        except ClientError as error:
            self._fault = BridgeFault(f"the rollout server refused a task: {error}")
        finally:
            self._in_flight.pop(number, None)
            self._late.pop(number, None)
            self._changed.set()

    def _give_up(self, number: int) -> None:
        """A straggler makes room for another group; should it finish after all, it is surplus."""
        if number not in self._in_flight:
            return
        log.warning("a group is still running after %s s: replaced", self._config.straggler_deadline)
        self._late[number] = self._in_flight.pop(number)
        self._since.stragglers += 1
        self._count_drop(f"straggler: still running after {self._config.straggler_deadline} s")
        self._changed.set()
        if len(self._late) > self._config.batch * self._config.max_async_level:
            self._abandon(self._late.pop(min(self._late)))

    def _settle(self, source: list[Any], result: TaskResult, submitted: int) -> None:
        fraction = self._config.min_complete_accept_fraction
        verdict = judge(result, source, self._config.rules, submitted=submitted, min_fraction=fraction)
        if isinstance(verdict, Dropped):
            self._ledger.dropped(verdict.reason.value, verdict.tokens)
            self._drop(source, verdict)
            return
        self._ledger.accepted(verdict.arrived, verdict.trained, verdict.unused)
        if not self._drop_if_stale(verdict):
            self._drops_in_a_row.clear()
            self._finished.append(verdict)

    def _drop(self, source: list[Any], dropped: Dropped) -> None:
        log.warning("group %s dropped (%s): %s", source[0].group_index, dropped.reason.value, dropped.why)
        self._since.dropped(dropped)
        self._forget(source)
        self._count_drop(f"{dropped.reason.value}: {dropped.why}")

    def _count_drop(self, why: str) -> None:
        self._drops_in_a_row.append(why)
        if len(self._drops_in_a_row) >= self._config.max_consecutive_drops:
            self._fault = BridgeFault(
                f"{len(self._drops_in_a_row)} groups dropped in a row, none accepted "
                f"(polar_max_consecutive_drops): {_counted(self._drops_in_a_row)}"
            )

    def _drop_stale(self) -> None:
        self._finished = [group for group in self._finished if not self._drop_if_stale(group)]

    def _drop_if_stale(self, group: Group) -> bool:
        age = self._age(group).rollouts
        if age <= self._config.staleness_bound or not self._trains:
            return False
        why = (
            f"{age} rollouts old; polar_max_async_level + update_weights_interval allow {self._config.staleness_bound}"
        )
        if (only := self._versions.only) is not None and group.versions == {only[0]}:
            why += f"; the engine has told version {only[0]} since rollout {only[1]}: does it get the new weights?"
        self._ledger.expired(Drop.STALE.value, group.trained)
        self._drop(group.source, Dropped(Drop.STALE, group.trained, len(group.source), why, group.dropped_traces))
        return True

    def _age(self, group: Group) -> Age:
        return self._versions.age(group.versions, submitted=group.submitted, consuming=self._rollout_id)

    async def _change(self) -> None:
        """Returns when a group came in or was given up. Raises what keeps the rollout from going on."""
        try:
            async with asyncio.timeout(PROGRESS_SECONDS):
                await self._changed.wait()
        except TimeoutError:
            log.info("rollout %d waits: %s", self._rollout_id, self._scheduler())
        self._changed.clear()
        if (fault := self._end or self._fault) is not None:
            raise fault

    def end(self) -> None:
        """As close, and for good."""
        self._end = self._end or BridgeFault(CLOSED)
        self.close()

    def close(self) -> None:
        """Cancels everything, also a call that waits; what was taken and not returned is the data source's again."""
        self._fault = BridgeFault(CLOSED)
        running = [*self._in_flight.values(), *self._late.values()]
        for each in running:
            each.task.cancel()
        self._hand_back([each.source for each in running] + [group.source for group in self._finished])
        for group in self._finished:
            self._ledger.expired("closed", group.trained)
        self._finished.clear()

    async def _cancel_all(self) -> None:
        """Returns when nothing is in flight. Stragglers are given up; what had replaced one is for the next call."""
        running = [each.task for each in (*self._in_flight.values(), *self._late.values())]
        self._hand_back([each.source for each in self._in_flight.values()])
        for each in self._late.values():
            self._abandon(each)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _abandon(self, late: Running) -> None:
        late.task.cancel()
        self._forget(late.source)

    def _hand_back(self, sources: list[list[Any]]) -> None:
        if sources:
            self._source.add_samples(sorted(sources, key=lambda source: source[0].group_index or 0))

    def _forget(self, source: list[Any]) -> None:
        if hasattr(self._source, "dropped"):
            self._source.dropped(source)

    def _hand_over(self, groups: list[Group]) -> Collected:
        for group in groups:
            self._ledger.handed_over(group.trained)
        if hasattr(self._source, "returned"):
            self._source.returned(self._rollout_id, [group.source for group in groups])
        ages = [self._age(group) for group in groups]
        numbers = train_metrics(groups, ages, self._since, self._scheduler() | self._source_counts(), self._ledger)
        self._since = SinceLastCall()
        return Collected(groups, numbers)

    def _scheduler(self) -> dict[str, int]:
        active = len(self._in_flight) + len(self._late)
        return {
            "active_groups": active,
            "active_sessions": active * self.args.n_samples_per_prompt,
            "completed_buffer": len(self._finished),
            "output_queue": self._config.batch,
            "deferred_queue": len(self._late),
            "requested_groups": self._config.batch,
        }

    def _source_counts(self) -> dict[str, int]:
        counted = ("surplus_prompts", "resumed_groups")
        return {name: getattr(self._source, name) for name in counted if hasattr(self._source, name)}


def _counted(reasons: Sequence[str]) -> str:
    """Reasons that are equal but for names and numbers are told once, in the words of the last."""
    alike: dict[str, list[str]] = {}
    for reason in reasons:
        alike.setdefault(_WITH_A_DIGIT.sub("", reason), []).append(reason)
    return "; ".join(f"{len(each)} × {each[-1]}" for each in sorted(alike.values(), key=len, reverse=True))
