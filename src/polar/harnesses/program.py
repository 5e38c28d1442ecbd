"""Harnesses that are a program of others: it has to be in the sandbox, in the version that was asked for."""

from __future__ import annotations

import shlex
from typing import ClassVar

from polar.errors import HarnessFault
from polar.harnesses.base import BaseHarness, Settings
from polar.protocols import Runtime
from polar.requests import ExecInput

_CHECK_SECONDS = 60.0


class ProgramSettings(Settings):
    """`command`: the program's path in the sandbox, or its name on PATH. `version`: refused when it is another."""

    command: str
    version: str | None = None


class ProgramHarness(BaseHarness):
    tried_with: ClassVar[str]
    """the version that this preset was last run with"""
    install: ClassVar[str]
    """how one gets it"""
    version_argument: ClassVar[str] = "--version"

    async def setup(self, runtime: Runtime) -> None:
        """Raises HarnessFault where the program is missing, or is another version."""
        command, wanted = shlex.quote(self.settings.command), self.settings.version
        ask = f"{command} {self.version_argument} 2>&1" if wanted else "true"
        step = ExecInput(command=f"command -v {command} >/dev/null || exit 127; {ask}")
        result = await runtime.run(step, timeout=_CHECK_SECONDS)
        if result.exit_code == 127:
            raise HarnessFault(
                f"{self.settings.command} is not in the sandbox: {self.install}, and give its folder in "
                f"runtime.kwargs.bind and its path in agent.settings.command (tried with {self.tried_with})",
                name="prepare",
            )
        if wanted and wanted not in result.output:
            found = result.output.strip()[:200]
            raise HarnessFault(f"{self.settings.command} is not version {wanted}: it says {found}", name="prepare")
