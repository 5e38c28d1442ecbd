"""Fixtures of a real proxy over a scripted engine."""

from running_proxy import chat_proxy, engine, proxy, rendering, tokenizer

__all__ = ["chat_proxy", "engine", "proxy", "rendering", "tokenizer"]
