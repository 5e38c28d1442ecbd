"""mini-swe-agent's command `mini`, which takes the instruction as an argument only: one of 128 KiB is refused."""

from __future__ import annotations

import shlex
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from polar.errors import TaskFault
from polar.harnesses.base import INSTRUCTION, Settings
from polar.harnesses.program import ProgramHarness, ProgramSettings
from polar.protocols import Runtime
from polar.requests import ExecInput

MOST_ARGUMENT = 128 << 10
"""bytes of one argument on Linux, its end included"""
_CONFIGS = {"tools": "mini.yaml", "text": "mini_textbased.yaml"}
_ENVIRONMENT = {
    "MSWEA_CONFIGURED": "true",
    "MSWEA_COST_TRACKING": "ignore_errors",
    "MSWEA_SILENT_STARTUP": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
}


class MiniSettings(ProgramSettings):
    """`calls`: how the model acts, by tool calls or by commands in its text. `config`: further -c, as they stand."""

    command: str = "mini"
    calls: Literal["tools", "text"] = "tools"
    step_limit: Annotated[int, Field(ge=1)] | None = None
    config: tuple[str, ...] = ()


class MiniSweAgent(ProgramHarness):
    tried_with = "2.4.6"
    install = "pip install mini-swe-agent"
    version_argument = "--help"
    Settings: ClassVar[type[Settings]] = MiniSettings

    async def setup(self, runtime: Runtime) -> None:
        if len(await runtime.read(f"{runtime.session_dir}/instruction.txt")) >= MOST_ARGUMENT:
            raise TaskFault("mini_swe_agent takes the instruction as an argument, and Linux none of 128 KiB or more")
        await super().setup(runtime)

    def run_steps(self, instruction: str) -> list[ExecInput]:
        settings = self.settings
        words = [settings.command, "-y", "--exit-immediately", "-l", "0", "-m", f"openai/{self.spec.model_name}"]
        words += ["--model-class", "litellm_textbased"] if settings.calls == "text" else []
        limit = [f"agent.step_limit={settings.step_limit}"] if settings.step_limit else []
        for config in (_CONFIGS[settings.calls], *limit, *settings.config):
            words += ["-c", config]
        places = 'export OPENAI_API_BASE="$OPENAI_BASE_URL" MSWEA_GLOBAL_CONFIG_DIR="$SESSION_DIR/.mini"'
        command = f'{places}; {shlex.join(words)} -o "$AGENT_LOG_DIR/trajectory.json" -t "$(cat {INSTRUCTION})"'
        return [ExecInput(command=command, env=_ENVIRONMENT | self.spec.env)]
