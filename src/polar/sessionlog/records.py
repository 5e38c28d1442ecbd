"""The kinds of record in a session log. One file an attempt; every other view of an attempt is a function of it.

A prompt is stored as what it adds: the first `keep` ids of call `base`'s whole sequence (its prompt + its sampled ids),
then `ids`. Messages and bodies are stored the same way. So a log is linear in the tokens of its session.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from polar.records import IDS, LOGPROBS, LogprobMode

SCHEMA_VERSION = 2
READABLE = (1, 2)
"""version 1 has every body whole"""


class Header(msgspec.Struct, kw_only=True, tag="header"):
    schema_version: int = SCHEMA_VERSION
    session_id: str
    task_id: str
    attempt: int
    session_index: int = 0
    model: str
    engine: str = ""
    """engine kind: sglang, vllm, embedded, openai"""
    tokenizer: str | None = None
    tokenizer_sha256: str | None = None
    sampling: dict[str, Any] = {}
    logprob_mode: str | None = LogprobMode.SAMPLING_TEMPERATURE.value
    """a LogprobMode; None: not known"""
    reasoning: str = "keep"
    created_at: float


class Opened(msgspec.Struct, kw_only=True, tag="opened"):
    """Precedes the engine call. The harness's own request, byte for byte, is `body_keep` bytes of the body of call
    `body_base`, `body` (zstd), and the last `body_tail` bytes of that body."""

    call: int
    at: float
    dialect: str
    body: bytes
    body_base: int | None = None
    body_keep: int = 0
    body_tail: int = 0
    model: str
    stream: bool = False
    auxiliary: bool = False
    sampling: dict[str, Any] = {}
    """the values used, after the task's override"""
    constrained: bool = False
    """sampled from another distribution than the model's own: see Exclusion.CONSTRAINED"""
    images: bool = False
    """there are images among its messages, in their `parts`"""
    messages_base: int | None = None
    messages_keep: int = 0
    messages: list[dict[str, Any]] = []
    """canonical messages behind the first `messages_keep` ones of call `messages_base` (its prompt and its answer)"""
    tools_from: int | None = None
    """a call that had the same tools; else they stand in `tools`"""
    tools: list[dict[str, Any]] | None = None


class Prompt(msgspec.Struct, kw_only=True, tag="prompt"):
    """The exact ids the engine was given, or said that it had (source `engine`)."""

    call: int
    base: int | None = None
    keep: int = 0
    ids: np.ndarray
    source: Literal["continued", "rendered", "engine"]
    why: str | None = None
    """why it was rendered again although the messages continue a known call"""
    expected: int | None = None
    """the call whose answer the *messages* continue; a prompt that does not keep all of it is a fork or drift"""

    def __post_init__(self) -> None:
        self.ids = np.asarray(self.ids, IDS)


class Chunk(msgspec.Struct, kw_only=True, tag="chunk"):
    """Tokens handed over by the engine: ids [n], logprobs [n] or None, one policy version. A null becomes NaN."""

    call: int
    ids: np.ndarray
    logprobs: np.ndarray | None = None
    version: str | None = None

    def __post_init__(self) -> None:
        self.ids = np.asarray(self.ids, IDS)
        if self.logprobs is not None:
            self.logprobs = np.asarray(self.logprobs, LOGPROBS)


class Finished(msgspec.Struct, kw_only=True, tag="finished"):
    """Written before the harness sees the last byte. `finish_reason`: stop, length, tool_calls, abort or error."""

    call: int
    at: float
    finish_reason: str
    matched: int | str | None = None
    message: dict[str, Any] | None = None
    """the canonical assistant message that the harness was given"""
    text: str = ""
    """the engine's raw text, before parsing"""
    first_token_at: float | None = None
    fault: str | None = None
    """name of the fault that ended the call"""
    error: str | None = None
    over_limit: bool = False
    usage: dict[str, int] = {}


class Delivered(msgspec.Struct, kw_only=True, tag="delivered"):
    """The dialect's terminal event, or the whole body, was handed to the socket without error."""

    call: int
    at: float


class Joined(msgspec.Struct, kw_only=True, tag="joined"):
    """A retry joined this call in flight, or had its answer replayed."""

    call: int
    at: float


class Refused(msgspec.Struct, kw_only=True, tag="refused"):
    """A request that made no engine call. `reason`: limit, context, bad_request, unsupported."""

    at: float
    dialect: str
    reason: str
    detail: str


class Sealed(msgspec.Struct, kw_only=True, tag="sealed"):
    at: float
    calls: int
    sampled: int


Record = Header | Opened | Prompt | Chunk | Finished | Delivered | Joined | Refused | Sealed
