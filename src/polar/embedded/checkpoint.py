"""A model's folder: weights, tokenizer and chat template, in Hugging Face's layout.

`config.json` names the class that holds the weights (`policy_class`, "module:Class"), so the engine knows no model.
The class gives `load(folder)`, `window` (how many last tokens a step must see), `prefill` and `decode`, as
`polar_demo.policy` does.
"""

from __future__ import annotations

import importlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer
from torch import Tensor


class PolicyModel(Protocol):
    """B sequences, T tokens, V words, W window, N layers, H heads, S cache places, D width of a head."""

    window: int

    def prefill(self, ids_B_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]: ...

    def decode(self, last_B_W: Tensor, positions_B: Tensor, cache_N_2_B_H_S_D: Tensor) -> Tensor: ...

    def state_dict(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Checkpoint:
    """What is read once at start. New weights come as another folder, whose shapes must be the same."""

    path: str
    policy: PolicyModel
    tokenizer: Tokenizer
    template: str
    special_tokens: dict[str, str]
    vocab_size: int
    context_length: int
    eos_ids: frozenset[int]

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def render(self, messages: list[dict[str, Any]], **variables: Any) -> list[int]:
        """Token ids of a conversation. Raises jinja2.TemplateError where the template refuses it."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.globals["raise_exception"] = _refuse
        text = environment.from_string(self.template).render(messages=messages, **self.special_tokens, **variables)
        return self.tokenizer.encode(text, add_special_tokens=False).ids


def load_policy(folder: Path) -> PolicyModel:
    """Raises ValueError naming the file and what is wrong with it."""
    config = _json(folder / "config.json")
    module, _, name = str(config.get("policy_class")).partition(":")
    try:
        policy: PolicyModel = getattr(importlib.import_module(module), name).load(folder)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"{folder / 'config.json'}: policy_class {config.get('policy_class')!r}: {error}") from error
    except (OSError, TypeError, RuntimeError) as error:
        raise ValueError(f"{folder}: cannot load the weights: {error}") from error
    unsound = [key for key, weights in policy.state_dict().items() if not torch.isfinite(weights).all()]
    if unsound:
        raise ValueError(f"{folder}: weights are not finite: {', '.join(unsound[:3])}")
    return policy


def load_checkpoint(path: str) -> Checkpoint:
    """Raises ValueError naming the file and what is wrong with it."""
    folder = Path(path)
    config, tokens = _json(folder / "config.json"), _json(folder / "tokenizer_config.json")
    for key in ("vocab_size", "max_position_embeddings", "eos_token_id"):
        if key not in config:
            raise ValueError(f"{folder / 'config.json'}: {key} is missing")
    eos = config["eos_token_id"]
    return Checkpoint(
        path=path,
        policy=load_policy(folder),
        tokenizer=Tokenizer.from_file(str(folder / "tokenizer.json")),
        template=str(tokens.get("chat_template", "")),
        special_tokens={
            key: value for key, value in tokens.items() if key.endswith("_token") and isinstance(value, str)
        },
        vocab_size=config["vocab_size"],
        context_length=config["max_position_embeddings"],
        eos_ids=frozenset(eos if isinstance(eos, list) else [eos]),
    )


def check_same_shapes(old: PolicyModel, new: PolicyModel) -> None:
    """Raises ValueError where the new weights are of another architecture."""
    shapes = [{key: tuple(weights.shape) for key, weights in policy.state_dict().items()} for policy in (old, new)]
    differing = sorted(key for key in shapes[0].keys() | shapes[1].keys() if shapes[0].get(key) != shapes[1].get(key))
    if differing:
        raise ValueError(f"these weights have another shape than the running ones: {', '.join(differing[:3])}")


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _refuse(message: str) -> None:
    raise TemplateError(message)
