"""What most harnesses share: nothing to set up, nothing afterwards, and settings refused by name when wrong."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError

from polar.config import wrong_fields
from polar.errors import WrongFields
from polar.protocols import ExecResult, Runtime
from polar.requests import AgentSpec, ExecInput

INSTRUCTION = '"$SESSION_DIR/instruction.txt"'
"""The instruction's file, quoted for the shell; the gateway has written it before the harness starts."""


class Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class BaseHarness:
    """`agent.settings` is checked against `Settings` of the class when it is made. Raises WrongFields."""

    makes_calls: ClassVar[bool] = True
    takes: ClassVar[frozenset[str]] = frozenset()
    """of mcp_servers and skills_path, those that this harness hands on; the others are refused"""
    Settings: ClassVar[type[Settings]] = Settings

    def __init__(self, spec: AgentSpec) -> None:
        self.spec = spec
        try:
            self.settings: Any = self.Settings.model_validate(spec.settings)
        except ValidationError as error:
            raise wrong_fields(error, "agent", "settings") from error
        for field in ("mcp_servers", "skills_path"):
            if getattr(spec, field) and field not in self.takes:
                raise WrongFields([(("agent", field), f"the harness {spec.harness or spec.import_path} takes none")])

    async def setup(self, runtime: Runtime) -> None:
        return None

    def run_steps(self, instruction: str) -> list[ExecInput]:
        raise NotImplementedError

    def postrun_steps(self) -> list[ExecInput]:
        return []

    async def postprocess(self, runtime: Runtime, result: ExecResult) -> None:
        return None
