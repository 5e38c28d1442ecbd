"""Harnesses by name: agent programs as they are, told only a base URL, a key and what to do."""

from __future__ import annotations

from polar.plugins import load
from polar.protocols import Harness
from polar.requests import AgentSpec

HARNESSES = {
    "claude_code": "polar.harnesses.claude_code:ClaudeCode",
    "mini_swe_agent": "polar.harnesses.mini_swe_agent:MiniSweAgent",
    "shell": "polar.harnesses.shell:Shell",
}


def load_harness(spec: AgentSpec) -> Harness:
    """Raises TaskFault: unknown name, wrong settings."""
    harness: Harness = load("harness", HARNESSES, spec.harness, spec.import_path)(spec)
    return harness
