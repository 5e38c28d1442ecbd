"""Claude Code, headless: the instruction on stdin, every permission given (the sandbox is what holds it).

Its small helper model is called `<model>-aux`, so that the proxy can tell those calls from the policy's.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated, ClassVar

from pydantic import Field

from polar.harnesses.base import INSTRUCTION, Settings
from polar.harnesses.program import ProgramHarness, ProgramSettings
from polar.protocols import Runtime
from polar.requests import ExecInput

_SWITCHED_OFF = {
    "DISABLE_AUTOUPDATER": "1",
    "DISABLE_TELEMETRY": "1",
    "DISABLE_ERROR_REPORTING": "1",
    "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
}


class ClaudeSettings(ProgramSettings):
    """`tools`: the only ones offered (the prompt shrinks with them). `arguments`: further ones, as they stand."""

    command: str = "claude"
    max_turns: Annotated[int, Field(ge=1)] | None = None
    permission: str = "bypassPermissions"
    tools: list[str] | None = None
    arguments: tuple[str, ...] = ()


class ClaudeCode(ProgramHarness):
    tried_with = "2.1.197"
    install = "npm install --prefix FOLDER @anthropic-ai/claude-code"
    takes = frozenset({"mcp_servers", "skills_path"})
    Settings: ClassVar[type[Settings]] = ClaudeSettings

    async def setup(self, runtime: Runtime) -> None:
        await super().setup(runtime)
        if self.spec.mcp_servers:
            await runtime.write(f"{runtime.session_dir}/mcp.json", json.dumps(self._mcp()).encode())
        if self.spec.skills_path:
            await runtime.upload(Path(self.spec.skills_path), f"{runtime.session_dir}/.claude/skills")

    def _mcp(self) -> dict[str, object]:
        servers: dict[str, object] = {}
        for server in self.spec.mcp_servers:
            kind = {"streamable-http": "http"}.get(server.transport, server.transport)
            reached = {"url": server.url} if server.url else {"command": server.command, "args": server.args}
            servers[server.name] = {"type": kind} | reached
        return {"mcpServers": servers}

    def run_steps(self, instruction: str) -> list[ExecInput]:
        model, settings = self.spec.model_name, self.settings
        words = [settings.command, "-p", "--output-format", "json"]
        if settings.permission == "bypassPermissions":
            words += ["--dangerously-skip-permissions"]
        else:
            words += ["--permission-mode", settings.permission]
        words += ["--max-turns", str(settings.max_turns)] if settings.max_turns else []
        words += ["--tools", ",".join(settings.tools)] if settings.tools is not None else []
        mcp = ' --mcp-config "$SESSION_DIR/mcp.json"' if self.spec.mcp_servers else ""
        command = f"{shlex.join([*words, *settings.arguments])}{mcp} < {INSTRUCTION}"
        # IS_SANDBOX: as root, which a sandbox's user may be, it refuses to skip permissions otherwise
        models = {"ANTHROPIC_MODEL": model, "ANTHROPIC_SMALL_FAST_MODEL": f"{model}-aux"}
        models |= {"ANTHROPIC_DEFAULT_HAIKU_MODEL": f"{model}-aux", "IS_SANDBOX": "1"}
        return [ExecInput(command=command, env=_SWITCHED_OFF | models | self.spec.env)]
