"""Inference engines. A new one is one file and one line in the table."""

from __future__ import annotations

from polar.errors import ConfigError
from polar.plugins import load
from polar.protocols import Engine
from polar.proxy.engines.watch import PATIENCE_SECONDS

ENGINES = {
    "sglang": "polar.proxy.engines.sglang:SGLang",
    "sglang_chat": "polar.proxy.engines.sglang_chat:SGLangChat",
    "embedded": "polar.proxy.engines.sglang:Embedded",
    "vllm": "polar.proxy.engines.vllm:VLLM",
    "vllm_chat": "polar.proxy.engines.vllm:VLLMChat",
    "openai": "polar.proxy.engines.openai:OpenAI",
}


async def make_engine(kind: str, base_url: str, patience_seconds: float = PATIENCE_SECONDS) -> Engine:
    """Connects to nothing yet. Raises ConfigError for a URL that is none and TaskFault for an unknown kind."""
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"inference.base_url: {base_url!r} is not a URL: it starts with http:// or https://")
    import_path = kind if ":" in kind else None
    engine: Engine = load("engine", ENGINES, kind, import_path)(base_url.rstrip("/"), patience_seconds)
    return engine
