"""What clients send. Unknown fields are ignored and can be listed (`ignored_fields`); bad values name their field.

Every number is finite: NaN and infinities are refused like any other wrong value.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]


LONGEST_IDENTIFIER, MOST_SAMPLES, MOST_ATTEMPTS = 200, 10_000, 100


def _check_identifier(value: str) -> str:
    if not value or len(value) > LONGEST_IDENTIFIER or any(ch in value for ch in "/\\\0\n") or value in (".", ".."):
        raise ValueError(f"must be 1 to {LONGEST_IDENTIFIER} characters without slashes, line breaks or NUL")
    return value


def _check_no_nul(value: str) -> str:
    if "\0" in value:
        raise ValueError("must not hold a NUL")
    return value


def _check_environment(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not name or "=" in name or "\0" in name + text:
            raise ValueError(
                f"{name!r} cannot be an environment variable: a name without = or NUL, a value without NUL"
            )
    return value


Identifier = Annotated[str, AfterValidator(_check_identifier)]
CommandText = Annotated[str, AfterValidator(_check_no_nul)]
PathText = Annotated[
    str, Field(max_length=4096, json_schema_extra={"pattern": r"^[^\x00]*$"}), AfterValidator(_check_no_nul)
]
Megabytes = Annotated[int, Field(ge=1, le=1 << 40)]
Environment = Annotated[dict[str, str], AfterValidator(_check_environment)]


class Request(BaseModel):
    model_config = ConfigDict(extra="ignore", allow_inf_nan=False)


class PrepareAction(Request):
    """One step that readies a sandbox. `upload_file` and `upload_dir` copy `source` (a path on the gateway's host,
    or for files the text itself in `content`) to `target`; `exec` runs `command`."""

    type: Literal["upload_file", "upload_dir", "exec"]
    source: PathText | None = None
    content: str | None = None
    target: PathText | None = None
    command: CommandText | None = None
    cwd: PathText | None = None
    env: Environment = {}

    @model_validator(mode="after")
    def _mutually_valid(self) -> PrepareAction:
        if self.type == "exec":
            if not self.command or self.source or self.target or self.content is not None:
                raise ValueError("an exec action has command, and neither source, content nor target")
        elif self.command or not self.target or (not self.source) == (self.content is None):
            raise ValueError(f"an {self.type} action has target and one of source or content, and no command")
        elif self.type == "upload_dir" and not self.source:
            raise ValueError("an upload_dir action has source, not content")
        return self


class RuntimeSpec(Request):
    backend: str | None = None
    image: str = ""
    prepare: list[PrepareAction] = []
    eval_prepare: list[PrepareAction] | None = None
    env: Environment = {}
    network: str = "none"
    workdir: PathText | None = None
    cpus: Annotated[float, Field(gt=0, le=1e6)] | None = None
    memory_mb: Megabytes | None = None
    storage_mb: Megabytes | None = None
    gpus: Annotated[int, Field(ge=0, le=1_000_000)] = 0
    allow_internet: bool = False
    import_path: str | None = None
    kwargs: dict[str, Any] = {}

    @model_validator(mode="after")
    def _one_runtime(self) -> RuntimeSpec:
        if self.backend and self.import_path:
            raise ValueError("give backend or import_path, not both")
        return self


class ExecInput(Request):
    """One command for /bin/sh. `stdin_path` is a file inside the sandbox."""

    command: CommandText
    cwd: PathText | None = None
    env: Environment = {}
    stdin_path: PathText | None = None


class McpServer(Request):
    name: str
    transport: Literal["stdio", "sse", "streamable-http"] = "stdio"
    command: str | None = None
    args: list[str] = []
    url: str | None = None


class AgentSpec(Request):
    harness: str | None = None
    import_path: str | None = None
    model_name: str = "policy"
    settings: dict[str, Any] = {}
    env: Environment = {}
    mcp_servers: list[McpServer] = []
    skills_path: str | None = None
    custom_shell: ExecInput | None = None

    @model_validator(mode="after")
    def _one_harness(self) -> AgentSpec:
        if bool(self.harness) == bool(self.import_path):
            raise ValueError("give exactly one of harness and import_path")
        if self.harness == "shell" and self.custom_shell is None:
            raise ValueError("harness 'shell' needs custom_shell: {command: what to run}")
        if self.harness != "shell" and self.custom_shell is not None:
            raise ValueError(
                f"custom_shell goes with harness 'shell' only, not with {self.harness or self.import_path!r}"
            )
        return self


class StrategySpec(Request):
    strategy: str = "prefix_merging"
    config: dict[str, Any] = {}


class EvaluatorSpec(Request):
    strategy: str
    config: dict[str, Any] = {}
    env: Environment = {}
    refresh_runtime: bool = False


class Budgets(Request):
    """Seconds a stage may take; None = the default of `budgets_of`."""

    queue: Seconds | None = None
    init: Seconds | None = None
    agent: Seconds | None = None
    build: Seconds | None = None
    evaluate: Seconds | None = None


class Sampling(Request):
    """Forced on every model call; what is None stays the harness's choice. Further engine parameters pass through."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)

    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: int | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    max_tokens: Count | None = None
    stop: list[str] | str | None = None
    stop_token_ids: list[int] | None = None
    seed: int | None = None


class Limits(Request):
    """Per session; beyond one the harness gets a clean error and the session ends as `limit`."""

    turns: Count | None = None
    tokens: Count | None = None
    seconds: Seconds | None = None
    concurrent_calls: Count | None = None
    cost: Annotated[float, Field(gt=0)] | None = None


class TaskRequest(Request):
    task_id: Identifier
    instruction: str
    num_samples: Annotated[int, Field(ge=1, le=MOST_SAMPLES)] = 1
    timeout_seconds: Seconds = 600.0
    runtime: RuntimeSpec | None = None
    agent: AgentSpec
    builder: StrategySpec = Field(default_factory=StrategySpec)
    evaluator: EvaluatorSpec | None = None
    callback_url: str | None = None
    metadata: dict[str, Any] = {}
    dispatch_priority: Annotated[int, Field(ge=0, le=100)] = 0
    node_labels: dict[str, str] = {}
    early_stop_min_usable_sessions: Count | None = None
    budgets: Budgets = Field(default_factory=Budgets)
    sampling: Sampling = Field(default_factory=Sampling)
    max_attempts: Annotated[int, Field(ge=1, le=MOST_ATTEMPTS)] = 2
    limits: Limits = Field(default_factory=Limits)
    reasoning: Literal["keep", "tool_cycle", "template"] = "keep"
    include_auxiliary: bool = False
    callback_format: Literal["json", "msgpack"] = "json"

    @model_validator(mode="before")
    @classmethod
    def _is_text(cls, raw: Any) -> Any:
        if not _is_wholly_text(raw) and (path := _lone_surrogate(raw)) is not None:
            raise ValueError(f"{path}: half of a surrogate pair is no text")
        return raw

    @model_validator(mode="after")
    def _early_stop_within_group(self) -> TaskRequest:
        enough = self.early_stop_min_usable_sessions
        if enough is not None and enough > self.num_samples:
            raise ValueError("early_stop_min_usable_sessions must be at most num_samples")
        if not self.instruction.strip():
            raise ValueError("instruction is empty: say what the agent is to do")
        return self


def _is_wholly_text(raw: Any) -> bool:
    """Quick; False where it cannot say."""
    try:
        json.dumps(raw, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def _lone_surrogate(value: Any, path: str = "") -> str | None:
    """Path of the first text that no encoding can hold."""
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError:
            return path or "the request"
        return None
    if isinstance(value, dict):
        names = (_lone_surrogate(key, f"a name in {path or 'the request'}") for key in value)
        inside = (_lone_surrogate(item, f"{path}.{key}".lstrip(".")) for key, item in value.items())
        return next((found for found in (*names, *inside) if found), None)
    if isinstance(value, list):
        return next((found for at, item in enumerate(value) if (found := _lone_surrogate(item, f"{path}.{at}"))), None)
    return None


INIT_SECONDS, BUILD_SECONDS, EVALUATE_SECONDS = 600.0, 120.0, 600.0


class StageBudgets(BaseModel):
    """Every budget decided, in seconds; queue None = waits for ever."""

    queue: float | None
    init: float
    agent: float
    build: float
    evaluate: float


def budgets_of(task: TaskRequest) -> StageBudgets:
    asked = task.budgets
    return StageBudgets(
        queue=asked.queue,
        init=asked.init or INIT_SECONDS,
        agent=asked.agent or task.timeout_seconds,
        build=asked.build or BUILD_SECONDS,
        evaluate=asked.evaluate or EVALUATE_SECONDS,
    )


_ENGINES_OWN = frozenset(
    """min_tokens min_new_tokens ignore_eos frequency_penalty presence_penalty repetition_penalty logit_bias
    skip_special_tokens spaces_between_special_tokens no_stop_trim stop_regex regex ebnf json_schema structural_tag
    custom_params""".split()  # noqa: SIM905
)
"""sampling parameters of engines that pass through; another name may be a misspelt one, and is named"""


def ignored_fields(raw: Any, model: type[BaseModel] = TaskRequest, path: str = "") -> list[str]:
    """Dotted paths of the fields in `raw` that `model` does not know, for the header X-Polar-Ignored; of sampling
    also the names that neither it nor any engine is known to have, though they are passed on."""
    if not isinstance(raw, dict):
        return []
    unknown: list[str] = []
    for key, value in raw.items():
        field = model.model_fields.get(key)
        if field is None:
            if model.model_config.get("extra") != "allow" or key not in _ENGINES_OWN:
                unknown.append(f"{path}{key}")
            continue
        for inner in _models_in(field.annotation):
            items = value if isinstance(value, list) else [value]
            for item in items:
                unknown += ignored_fields(item, inner, f"{path}{key}.")
    return list(dict.fromkeys(unknown))


def _models_in(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for inner in getattr(annotation, "__args__", ()) for model in _models_in(inner)]
