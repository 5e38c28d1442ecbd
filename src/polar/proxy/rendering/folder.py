"""A tokenizer's folder in the usual layout, read once. What is missing is named, with what to do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from polar.errors import ConfigError

_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token")


class TokenizerFolder(msgspec.Struct, kw_only=True):
    """`template`: "" where the folder has none. `special_tokens`: what a template may call bos_token, eos_token, …;
    `eos_ids`: ids that end a generation."""

    name: str
    tokenizer_json: bytes
    template: str
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]

    @property
    def eos(self) -> str:
        return self.special_tokens.get("eos_token", "")


def read_folder(folder: Path) -> TokenizerFolder:
    """Raises ConfigError."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{folder} has no tokenizer.json: give the folder of the model's tokenizer")
    config = _document(folder / "tokenizer_config.json")
    names = _document(folder / "special_tokens_map.json") | config
    ids: list[int] = []
    for file in ("generation_config.json", "config.json"):
        given = _document(folder / file).get("eos_token_id")
        ids += given if isinstance(given, list) else [given] if isinstance(given, int) else []
    return TokenizerFolder(
        name=str(folder.resolve()),
        tokenizer_json=path.read_bytes(),
        template=_template(folder, config),
        special_tokens={name: text for name in _NAMES if (text := _token(names.get(name)))},
        eos_ids=tuple(dict.fromkeys(ids)),
    )


def _template(folder: Path, config: dict[str, Any]) -> str:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template}
        template = named.get("default") or next(iter(named.values()), None)
    return template if isinstance(template, str) else ""


def _token(value: Any) -> str | None:
    return value.get("content") if isinstance(value, dict) else value


def _document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        document = json.loads(path.read_bytes())
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    return document if isinstance(document, dict) else {}
