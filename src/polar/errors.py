"""Every fault says who is to blame, because only what the policy did may earn a reward.

`retryable` faults are the infrastructure's: the session gets another attempt. Every other fault ends the session.
`name` is a stable word that appears in results, metrics and `polar why`.
"""

from __future__ import annotations

import errno
from typing import ClassVar


class PolarError(Exception):
    """Base of all faults. `name` may be narrowed per instance, e.g. `EngineFault("…", name="engine_down")`."""

    blame: ClassVar[str] = "server"
    retryable: ClassVar[bool] = False
    default_name: ClassVar[str] = "error"

    def __init__(self, message: str, *, name: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.name = name or self.default_name


class PolicyFault(PolarError):
    """What the policy did: it is graded, never retried (a limit reached, a context overflowed, memory used up)."""

    blame = "policy"
    default_name = "policy"


class HarnessFault(PolarError):
    """The agent program itself failed (its exit code, its set-up)."""

    blame = "harness"
    default_name = "harness"


class TaskFault(PolarError):
    """The task is wrong: unknown plug-in, failing prepare action, missing file. Not retried."""

    blame = "task"
    default_name = "task"


class WrongFields(TaskFault):
    """`mistakes`: the path of each field that a plug-in refuses, and what is wrong with it."""

    def __init__(self, mistakes: list[tuple[tuple[int | str, ...], str]]) -> None:
        super().__init__("; ".join(f"{'.'.join(map(str, path))}: {words}" for path, words in mistakes))
        self.mistakes = mistakes


class SandboxFault(PolarError):
    """The sandbox did not come up, or was lost. Retried elsewhere where there is an elsewhere."""

    blame = "sandbox"
    retryable = True
    default_name = "sandbox_lost"


class EngineFault(PolarError):
    """The inference engine is down, hangs, or lies (missing ids, misaligned logprobs). Retried."""

    blame = "engine"
    retryable = True
    default_name = "engine_down"


class ServerFault(PolarError):
    """Our own side: a full disk, a lost gateway, a bug. Retried."""

    blame = "server"
    retryable = True
    default_name = "server_fault"


class BuildFault(PolarError):
    """The builder failed or its audit does not balance. The log is kept: the trajectory can be rebuilt."""

    blame = "server"
    default_name = "build"


class EvaluationFault(PolarError):
    """The evaluator failed or ran out of its budget: the reward is None, never 0. Evaluated once more."""

    blame = "task"
    default_name = "evaluation"


class ConfigError(PolarError):
    """A setting, topology or command line is wrong; the message names the key and what to do."""

    blame = "task"
    default_name = "config"


def from_os_error(error: OSError, doing: str) -> ServerFault:
    """A full disk is `disk_full`; everything else of the operating system is `io_error`. Never the policy's fault."""
    name = "disk_full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "io_error"
    return ServerFault(f"{doing}: {error}", name=name)
