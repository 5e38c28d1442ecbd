"""What a plug-in has to be. A plug-in is made as `Class(spec)` and found by name or as `module:Class`."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np

from polar.records import (
    BuildResult,
    EvaluationResult,
    LogprobMode,
    SessionStatus,
    Termination,
    Trajectory,
    VersionSpan,
)
from polar.requests import ExecInput, TaskRequest
from polar.sessionlog import SessionLog


class Place(msgspec.Struct, kw_only=True, frozen=True):
    """Where a sandbox belongs: its label (session, attempt) and a host folder that is its own and dies with it."""

    session_id: str
    attempt: int
    folder: Path


class Listener(msgspec.Struct, kw_only=True):
    """A listening socket held by us, and the base URL under which programs in the sandbox reach it."""

    sock: socket.socket
    url: str


class ExecResult(msgspec.Struct, kw_only=True):
    """How a command ended. `output` is the tail of stdout, `errors` of stderr (bounded); `limit_hit` = memory or
    process limit of the sandbox killed it. `exit_code` of a killed process is 128 + signal."""

    exit_code: int
    output: str = ""
    errors: str = ""
    timed_out: bool = False
    limit_hit: bool = False


class Runtime(Protocol):
    """A sandbox. Paths are paths inside it, relative ones from its working directory. After `stop`, and after `sweep`
    of a dead owner, nothing of it is left."""

    session_dir: str
    """inside the sandbox; has logs/, logs/agent/ and artifacts/"""
    env: dict[str, str]
    """given to every command, below the command's own; the gateway fills it before `setup`"""

    async def start(self, place: Place) -> None:
        """Raises SandboxFault (`sandbox_start`), with what to do about it."""
        ...

    async def listen(self) -> Listener: ...

    async def run(self, step: ExecInput, *, timeout: float, log: Path | None = None) -> ExecResult:
        """Runs one command with /bin/sh and returns when it has ended or its time is up (then it is killed).
        Output goes to the host file `log` up to a bound; a command that prints more loses output, not its life."""
        ...

    async def upload(self, source: Path, target: str) -> None:
        """Copies a host file or folder in. Raises TaskFault when `source` is not there."""
        ...

    async def write(self, target: str, data: bytes) -> None: ...

    async def read(self, path: str) -> bytes:
        """Raises FileNotFoundError."""
        ...

    async def kill_processes(self) -> None:
        """When it returns, no process in the sandbox is alive; files and listener stay."""
        ...

    async def stop(self) -> None:
        """Removes everything; may be called twice, and after a failed start."""
        ...


class Harness(Protocol):
    """An agent program. `makes_calls` False: it makes no model call, and having none is no fault."""

    makes_calls: bool

    async def setup(self, runtime: Runtime) -> None:
        """Raises TaskFault or HarnessFault: the session ends as `prepare`."""
        ...

    def run_steps(self, instruction: str) -> list[ExecInput]: ...

    def postrun_steps(self) -> list[ExecInput]: ...

    async def postprocess(self, runtime: Runtime, result: ExecResult) -> None: ...


class Builder(Protocol):
    """A pure function of a session log: same log, same bytes."""

    def build(self, log: SessionLog, *, include_auxiliary: bool = False) -> BuildResult: ...


class EvaluationContext(msgspec.Struct, kw_only=True):
    """What an evaluator sees. `runtime` is the agent's sandbox with every agent process dead, or a fresh one.
    `timeout` is for its commands; the budget of the whole, which a pause stretches, ends it from outside."""

    task: TaskRequest
    session_id: str
    status: SessionStatus
    termination: Termination
    trajectory: Trajectory
    runtime: Runtime | None
    timeout: float


class Evaluator(Protocol):
    needs_runtime: bool

    async def evaluate(self, context: EvaluationContext) -> EvaluationResult:
        """Raises EvaluationFault; a reward is finite, or None with a reason in the metadata."""
        ...


class EngineCall(msgspec.Struct, kw_only=True):
    """One request to an engine: exactly one of `prompt_ids` [n] (engines that take ids) and `messages`."""

    rid: str
    stream: bool = True
    """False: whoever asks wants the answer whole, and the engine may spare the pieces"""
    prompt_ids: np.ndarray | None = None
    grammar: dict[str, Any] | None = None
    """with prompt_ids: the form that the answer must have, as a format of structural tags"""
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_calls: bool = True
    """with messages: whether an answer may have several calls"""
    json_schema: dict[str, Any] | None = None
    """with messages: what the answer's text must be"""
    sampling: Mapping[str, Any]
    """temperature, top_p, top_k, min_p, max_tokens, stop, stop_token_ids, seed"""


class Piece(msgspec.Struct, kw_only=True):
    """What an engine handed over: disjoint, in order. The last piece of an answer, and only it, has `finish_reason`
    (stop, length, tool_calls or abort). `text` is the decoded text of these ids where the engine tells it."""

    ids: np.ndarray
    logprobs: np.ndarray | None = None
    text: str = ""
    reasoning: str = ""
    version: str | None = None
    versions: list[VersionSpan] = []
    """from engines that tell only at the end: the policy versions over all ids of this answer, on its last piece"""
    prompt_ids: np.ndarray | None = None
    """from engines that render themselves, on one piece: the prompt they used"""
    finish_reason: str | None = None
    matched: int | str | None = None
    message: dict[str, Any] | None = None
    """from engines that render and parse themselves: the assistant message"""
    usage: dict[str, int] = {}
    """from engines without ids: the figures that they report"""


class EngineFacts(msgspec.Struct, kw_only=True):
    """What a probe found. `problem` says in words why no training session may run on it, and what to do."""

    kind: str
    healthy: bool
    version: str | None = None
    """policy version"""
    model: str | None = None
    tokenizer_path: str | None = None
    context_length: int | None = None
    route: str | None = None
    """what is used of it"""
    returns_ids: bool = False
    returns_logprobs: bool = False
    """one a sampled token"""
    logprob_mode: LogprobMode | None = None
    grammars: bool | None = None
    """whether it can be held to JSON schemas and tool calls"""
    problem: str | None = None


class Engine(Protocol):
    """Made as Class(base_url, patience_seconds): how long it may hand nothing to anybody while calls wait.

    `takes_ids` and `grammars` (it can be held to a form) stand from the first probe on.
    """

    kind: str
    takes_ids: bool
    grammars: bool
    base_url: str

    def generate(self, call: EngineCall) -> AsyncIterator[Piece]:
        """Raises EngineFault (engine_down, engine_error, engine_timeout, engine_lies), PolicyFault `context` when the
        engine says that the prompt does not fit, or HarnessFault `engine_refused` when it refuses a setting or schema
        of the call. Cancelling the iteration aborts the call at the engine."""
        ...

    async def probe(self) -> EngineFacts:
        """Answers in under 5 s; never raises."""
        ...

    async def close(self) -> None: ...


class Delta(msgspec.Struct, kw_only=True, frozen=True):
    """A part of an assistant message that may be relayed; a tool call is whole."""

    kind: Literal["reasoning", "text", "tool_call"]
    text: str = ""
    call: dict[str, Any] | None = None


class AnswerReader(Protocol):
    """Reads one answer while it is sampled. What it hands out is a prefix of what `Rendering.parse` makes of it all."""

    def feed(self, ids: np.ndarray) -> list[Delta]: ...


class Rendering(Protocol):
    """Messages to ids and back. Messages and tools are canonical: OpenAI chat shape."""

    name: str
    sha256: str
    stop_ids: tuple[int, ...]
    """any of these ends a turn"""
    vocabulary: int
    """ids are below it"""

    def render(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> np.ndarray:
        """Prompt ids [n], with the generation prompt."""
        ...

    def bridge(
        self,
        sequence: np.ndarray,
        new_messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        *,
        sampled: int,
    ) -> np.ndarray | None:
        """Ids [m] to append behind `sequence`, a prompt and the `sampled` ids that end it, so that `new_messages` and
        the generation prompt follow; None where that cannot be done exactly. Tool results have their tool's `name`."""
        ...

    def parse(self, ids: np.ndarray, tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """The canonical assistant message of sampled ids; never raises on malformed tool calls: they stay text."""
        ...

    def reader(self, tools: list[dict[str, Any]] | None, stops: Sequence[str]) -> AnswerReader:
        """`stops` are the stop strings of the call: their text is held back as well."""
        ...

    def thinking(self, ids: np.ndarray) -> int:
        """How many of an answer's ids its reasoning takes up, if it has any: all up to where that ends."""
        ...

    def grammar(self, schema: dict[str, Any] | None, tools: list[dict[str, Any]] | None) -> dict[str, Any] | None:
        """The form of an answer that is JSON of `schema`, or a call of one of the `tools` (either, where both are
        given), as a format of structural tags. None where calls in this format cannot be held to a form."""
        ...

    def least_tokens(self, texts: Sequence[str], enough: int) -> int:
        """Less than what these texts take as part of a prompt, in a time that `enough` bounds, and not their length:
        more than `enough` is not counted."""
        ...

    def decode(self, ids: np.ndarray) -> str: ...
