"""What `runtime.kwargs` may hold for the runtimes built in; anything else is refused by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar.config import describe
from polar.errors import TaskFault
from polar.requests import RuntimeSpec


class Options(BaseModel):
    """`bind`: absolute host paths that programs see at the same place, read-only. `pids`: most processes at a time."""

    model_config = ConfigDict(extra="forbid")

    bind: list[Annotated[str, Field(pattern="^/")]] = []
    pids: Annotated[int, Field(ge=1)] = 4096

    @classmethod
    def of(cls, spec: RuntimeSpec) -> Options:
        """Raises TaskFault, also for what no runtime here gives."""
        try:
            options = cls.model_validate(spec.kwargs)
        except ValidationError as error:
            raise TaskFault(f"runtime.kwargs: {describe(error)}") from error
        if spec.gpus:
            raise TaskFault("runtime.gpus: the runtimes bubblewrap and local give no GPU of their own")
        if spec.network not in ("none", "host"):
            raise TaskFault(f"runtime.network {spec.network!r}: known are none, host")
        return options
