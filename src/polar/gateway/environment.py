"""What the agent's commands find in their environment: the proxy's address in every provider's words, and the key."""

from __future__ import annotations

from polar.requests import TaskRequest


def agent_environment(task: TaskRequest, session_id: str, base_url: str, key: str) -> dict[str, str]:
    """Below it stand the sandbox's own variables; runtime.env, then agent.env stand above it."""
    root = base_url.rstrip("/")
    ours = {
        "ANTHROPIC_BASE_URL": root,
        "ANTHROPIC_API_KEY": key,
        "OPENAI_BASE_URL": f"{root}/v1",
        "OPENAI_API_KEY": key,
        "GOOGLE_API_URL": root,
        "GOOGLE_GEMINI_BASE_URL": root,
        "GOOGLE_API_KEY": key,
        "GEMINI_API_KEY": key,
        "SESSION_ID": session_id,
        "TASK_ID": task.task_id,
    }
    runtime_env = task.runtime.env if task.runtime else {}
    return ours | runtime_env | task.agent.env
