"""Slime's rollout function: exactly rollout_batch_size accepted groups a call, three lists deep, never a hole.

Slime calls a plain function and keeps nothing between calls, so the one worker of the process is kept here.
"""

from __future__ import annotations

import atexit
from typing import Any

from slime_bridge.preflight import checked_config
from slime_bridge.slime_types import RolloutFnEvalOutput, RolloutFnTrainOutput
from slime_bridge.worker import Worker

_workers: list[Worker] = []


def generate_rollout_polar_async(
    args: Any, rollout_id: int, data_source: Any, evaluation: bool = False
) -> RolloutFnTrainOutput | RolloutFnEvalOutput:
    """Blocks until the rollout (or the evaluation) is complete.

    Raises ConfigError for settings that cannot work, BridgeFault where groups are dropped without end.
    """
    worker = _worker_for(args, data_source)
    if evaluation:
        return worker.evaluate(rollout_id)
    collected = worker.collect(rollout_id)
    return RolloutFnTrainOutput(samples=[group.samples for group in collected.groups], metrics=collected.metrics)


def close() -> None:
    """Ends the worker and cancels its tasks; the next call starts anew."""
    while _workers:
        _workers.pop().close()


atexit.register(close)


def _worker_for(args: Any, data_source: Any) -> Worker:
    config = checked_config(args)
    if _workers and (_workers[0].config != config or _workers[0].source is not data_source):
        close()
    if not _workers:
        _workers.append(Worker(args, config, data_source))
    _workers[0].use(args)
    return _workers[0]
