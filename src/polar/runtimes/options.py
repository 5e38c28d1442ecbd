"""What `runtime.kwargs` may hold for the runtimes built in; anything else is refused by name."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polar.config import wrong_fields
from polar.errors import WrongFields
from polar.requests import RuntimeSpec


class Options(BaseModel):
    """`bind`: absolute host paths that programs see at the same place, read-only. `pids`: most processes at a time."""

    model_config = ConfigDict(extra="forbid")

    bind: list[Annotated[str, Field(pattern="^/")]] = []
    pids: Annotated[int, Field(ge=1)] = 4096

    @classmethod
    def of(cls, spec: RuntimeSpec) -> Options:
        """Raises WrongFields, also for what no runtime here gives."""
        try:
            options = cls.model_validate(spec.kwargs)
        except ValidationError as error:
            raise wrong_fields(error, "runtime", "kwargs") from error
        if spec.gpus:
            raise WrongFields([(("runtime", "gpus"), "the runtimes bubblewrap and local give no GPU of their own")])
        if spec.network not in ("none", "host"):
            raise WrongFields([(("runtime", "network"), f"unknown network {spec.network!r}: known are none, host")])
        if spec.workdir and not spec.workdir.startswith("/"):
            raise WrongFields([(("runtime", "workdir"), f"{spec.workdir!r} is not an absolute path")])
        return options
