"""kill −9 at a named point: the process that was armed ends itself there, without a chance to put anything in order.
At the points named "stalled" it stands still instead, for longer than a lease.

Nothing of it is in the product: `arm` wraps the product's functions in the process that it is called in.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

SMALL_PART = 700
"""bytes of a log that a gateway sends at a time, so that small logs have a middle"""
MOST_PASSINGS = 4
LONGEST_MOMENT = 2.0
STALL_SECONDS = 3
Passing = Callable[[], None]
Holds = Callable[[Any, tuple[Any, ...]], bool]
"""of a call's result (None before it) and its arguments: whether it counts"""


class Plan(NamedTuple):
    """Kill at the `passing`-th passing of `point`; at a `moment`, so many tenths of the longest after the start."""

    point: str
    passing: int


def _around(target: str, when: str, holds: Holds = lambda result, arguments: True) -> Callable[[Passing], None]:
    """Wraps the function `module:name` or `module:Class.name`; `when` is before or after it."""

    def arm(passing: Passing) -> None:
        owner, name, function = _find(target)

        def before(arguments: tuple[Any, ...]) -> None:
            if when == "before" and holds(None, arguments):
                passing()

        def after(result: Any, arguments: tuple[Any, ...]) -> None:
            if when == "after" and holds(result, arguments):
                passing()

        @functools.wraps(function)
        async def wrapped_async(*arguments: Any, **options: Any) -> Any:
            before(arguments)
            result = await function(*arguments, **options)
            after(result, arguments)
            return result

        @functools.wraps(function)
        def wrapped(*arguments: Any, **options: Any) -> Any:
            before(arguments)
            result = function(*arguments, **options)
            after(result, arguments)
            return result

        setattr(owner, name, wrapped_async if inspect.iscoroutinefunction(function) else wrapped)

    arm.target = target  # type: ignore[attr-defined]
    return arm


def _find(target: str) -> tuple[Any, str, Any]:
    module, _, path = target.partition(":")
    owner: Any = importlib.import_module(module)
    *classes, name = path.split(".")
    for each in classes:
        owner = getattr(owner, each)
    return owner, name, getattr(owner, name)


def _renaming(suffix: str, when: str) -> Callable[[Passing], None]:
    """Around the rename that makes a file with this ending whole."""

    def arm(passing: Passing) -> None:
        for name in ("rename", "replace"):
            _around(f"os:{name}", when, lambda _, files: str(files[1]).endswith(suffix))(passing)

    return arm


def _deleting(suffix: str) -> Callable[[Passing], None]:
    return _around("os:unlink", "after", lambda _, files: str(files[0]).endswith(suffix))


def _record(kind: str, when: str) -> Callable[[Passing], None]:
    """Around the writing of a record of this kind, alone or with others, into a session log."""

    def holds(_: Any, arguments: tuple[Any, ...]) -> bool:
        return kind in {type(record).__name__ for record in arguments[1:]}

    return _around("polar.sessionlog.writer:LogWriter.append", when, holds)


def _while_it_waits(target: str) -> Callable[[Passing], None]:
    """Just after the call has begun to wait for somebody."""

    def arm(passing: Passing) -> None:
        owner, name, function = _find(target)

        @functools.wraps(function)
        async def wrapped(*arguments: Any, **options: Any) -> Any:
            threading.Timer(0.05, passing).start()
            return await function(*arguments, **options)

        setattr(owner, name, wrapped)

    arm.target = target  # type: ignore[attr-defined]
    return arm


def _moment(passing: Passing) -> None:
    def tick() -> None:
        while True:
            time.sleep(LONGEST_MOMENT / 10)
            passing()

    threading.Thread(target=tick, daemon=True).start()


SERVER: dict[str, Callable[[Passing], None]] = {
    "server start: before": _around("polar.server.core:Core.__init__", "before"),
    "server start: database open": _around("polar.server.store:Store.__init__", "after"),
    "server start: state read": _around("polar.server.core:Core.__init__", "after"),
    "commit: before": _around("polar.server.store:Store.commit", "before"),
    "commit: after": _around("polar.server.store:Store.commit", "after"),
    "server's result: before the rename": _renaming(".result", "before"),
    "server's result: after the rename": _renaming(".result", "after"),
    "sealed log: before the rename": _renaming(".zst", "before"),
    "sealed log: after the rename": _renaming(".zst", "after"),
    "log upload: received in the middle": _around("os:pwrite", "after"),
    "lease: saved, not told": _around("polar.server.node_routes:NodeApi._work", "after", lambda reply, _: reply.leases),
    "callback: before": _around("polar.server.deliveries:Courier._post", "before"),
    "callback: asked": _while_it_waits("polar.server.deliveries:Courier._post"),
    "callback: answered": _around("polar.server.deliveries:Courier._post", "after"),
    "server: any moment": _moment,
    "server: stalled at any moment": _moment,
}
GATEWAY: dict[str, Callable[[Passing], None]] = {
    "gateway start: before the sweep": _around("polar.gateway.node:sweep", "before"),
    "gateway start: swept": _around("polar.gateway.node:sweep", "after"),
    "gateway start: rescued": _around("polar.gateway.outbox:Outbox.rescue", "after"),
    "sandbox: asked for": _around("polar.runtimes.launcher:Launcher._request", "after"),
    "sandbox: there": _around("polar.runtimes.launcher:Launcher.launch", "after"),
    "call: opened": _record("Opened", "after"),
    "call: sampled": _record("Chunk", "after"),
    "call: before finished": _record("Finished", "before"),
    "call: finished": _record("Finished", "after"),
    "call: delivered": _record("Delivered", "after"),
    "log: sealed": _around("polar.sessionlog.writer:LogWriter.seal", "after"),
    "build: before": _around("polar.gateway.session:Session._build_now", "before"),
    "build: after": _around("polar.gateway.session:Session._build_now", "after"),
    "evaluation: before": _around("polar.gateway.session:grade", "before"),
    "evaluation: command runs": _while_it_waits("polar.evaluators.base:BaseEvaluator.execute"),
    "evaluation: after": _around("polar.gateway.session:grade", "after"),
    "clearing up: before": _around("polar.gateway.session:Session._clear_now", "before"),
    "clearing up: after": _around("polar.gateway.session:Session._clear_now", "after"),
    "outbox: before": _around("polar.gateway.outbox:Outbox.put", "before"),
    "outbox: packed, before the rename": _renaming(".log.zst", "before"),
    "outbox: packed": _renaming(".log.zst", "after"),
    "outbox: result, before the rename": _renaming(".result", "before"),
    "outbox: result there": _renaming(".result", "after"),
    "outbox: after": _around("polar.gateway.outbox:Outbox.put", "after"),
    "log upload: a part sent": _around("polar.gateway.link:ServerLink._put", "after"),
    "result: posted, answer not read": _around("polar.gateway.link:ServerLink.result", "after"),
    "result: answered, not deleted": _around("polar.gateway.outbox:Outbox.send", "after"),
    "result: half deleted": _deleting(".result"),
    "poll: before": _around("polar.gateway.link:ServerLink.poll", "before"),
    "poll: after": _around("polar.gateway.link:ServerLink.poll", "after"),
    "gateway: any moment": _moment,
    "gateway: stalled at any moment": _moment,
}


def plans(points: dict[str, Any], chance: random.Random, count: int) -> list[Plan]:
    """One for each of the first `count` lives of a process."""
    return [Plan(name, chance.randint(1, _most_passings(name))) for name in chance.sample(sorted(points), count)]


def _most_passings(point: str) -> int:
    if " start: " in point:  # once a life
        return 1
    return 10 if point.endswith("moment") else MOST_PASSINGS


def arm(plan: Plan | None, folder: Path) -> None:
    """Kills as `plan` says while the file `folder`/armed is there, and notes the point in `folder`/kills."""
    for point in (SERVER | GATEWAY).values():
        if hasattr(point, "target"):  # a function that got another name is missed by every run, not by a few
            _find(point.target)
    importlib.import_module("polar.gateway.link").PART_BYTES = SMALL_PART
    if plan is None:
        return
    passed = 0

    def passing() -> None:
        nonlocal passed
        passed += 1
        if passed == plan.passing and (folder / "armed").exists():
            with (folder / "kills").open("a") as kills:
                kills.write(f"{plan.point}\n")
            if "stalled" in plan.point:
                subprocess.Popen(["/bin/sh", "-c", f"sleep {STALL_SECONDS}; kill -CONT {os.getpid()}"])
                os.kill(os.getpid(), signal.SIGSTOP)
            else:
                os.kill(os.getpid(), signal.SIGKILL)

    (SERVER | GATEWAY)[plan.point](passing)
