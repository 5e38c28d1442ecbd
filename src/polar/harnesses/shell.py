"""A command of the task's own as the harness. It finds the instruction in $SESSION_DIR/instruction.txt."""

from __future__ import annotations

from polar.harnesses.base import BaseHarness
from polar.requests import ExecInput


class Shell(BaseHarness):
    def run_steps(self, instruction: str) -> list[ExecInput]:
        """`custom_shell` as it stands: the instruction is no argument, so it may have any length."""
        assert self.spec.custom_shell is not None, "AgentSpec asks for it with harness 'shell'"
        return [self.spec.custom_shell]
