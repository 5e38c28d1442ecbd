"""A small transformer whose every way of running it gives the same numbers.

`forward` (training: whole sequences), `prefill` (an engine: prompts) and `decode` (an engine: one token a sequence)
agree to 1e-5 in fp32, whatever shares the batch: padding stands on the right, positions count from 0, masks come from
lengths. Shape suffixes: B sequences, T tokens, V words, W window, N layers, H heads, S cache places, D width of a
head.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class PolicyConfig:
    """config.json; the names are Hugging Face's. `policy_class` tells an engine what to load."""

    vocab_size: int
    eos_token_id: int
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 4
    max_position_embeddings: int = 8192
    policy_class: str = "polar_demo.policy:Policy"


class Block(nn.Module):
    """Attention and a two-layer perceptron, each behind its LayerNorm."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def project(self, x_B_T_C: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each [B, H, T, D], the first two rotated to their positions."""
        B, T, C = x_B_T_C.shape
        qkv = self.qkv(self.norm_attention(x_B_T_C)).view(B, T, 3, self.heads, C // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        return _rotate(q, cos, sin), _rotate(k, cos, sin), v

    def finish(self, x_B_T_C: Tensor, attended_B_H_T_D: Tensor) -> Tensor:
        x = x_B_T_C + self.out(attended_B_H_T_D.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class Policy(nn.Module):
    """Sees each token with the two before it: without that, copying a value from a file is not learned in minutes."""

    window = 3
    cos: Tensor
    sin: Tensor

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__()
        self.config = config
        width, head = config.hidden_size, config.hidden_size // config.num_attention_heads
        self.embedding = nn.Embedding(config.vocab_size, width)
        self.before = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(self.window - 1))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_hidden_layers))
        self.norm = nn.LayerNorm(width)
        nn.init.normal_(self.embedding.weight, std=0.1)  # the head is tied: logits start near 1, and no word is likely
        rate = 10_000.0 ** (-torch.arange(0, head, 2) / head)
        angle = torch.arange(config.max_position_embeddings)[:, None] * rate
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids_B_T: Tensor) -> Tensor:
        """Logits [B, T, V] of right-padded sequences; those behind a sequence's end mean nothing."""
        return self._head(self._causal(ids_B_T)[0])

    def prefill(self, ids_B_T: Tensor, lengths_B: Tensor) -> tuple[Tensor, Tensor]:
        """Logits [B, V] behind each prompt's last token, and the cache [N, 2, B, H, T, D]."""
        x, cache = self._causal(ids_B_T)
        return self._head(x[torch.arange(len(x)), lengths_B - 1]), torch.stack(cache)

    def decode(self, last_B_W: Tensor, positions_B: Tensor, cache_N_2_B_H_S_D: Tensor) -> Tensor:
        """Logits [B, V] behind each sequence's last token, which stands at `positions_B`; its cache place is filled."""
        x = self._embed(last_B_W)
        cos, sin = self.cos[positions_B][:, None, None], self.sin[positions_B][:, None, None]
        rows, places = torch.arange(len(x)), torch.arange(cache_N_2_B_H_S_D.shape[4])
        seen = (places <= positions_B[:, None])[:, None, None]
        for block, (keys, values) in zip(self._layers(), cache_N_2_B_H_S_D, strict=True):
            q, k, v = block.project(x, cos, sin)
            keys[rows, :, positions_B], values[rows, :, positions_B] = k[:, :, 0], v[:, :, 0]
            x = block.finish(x, F.scaled_dot_product_attention(q, keys, values, attn_mask=seen))
        return self._head(x[:, 0])

    def save(self, folder: Path) -> None:
        """Write `config.json` and `model.pt`."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(asdict(self.config), indent=2))
        torch.save(self.state_dict(), folder / "model.pt")

    @classmethod
    def load(cls, folder: Path) -> Policy:
        """Raises OSError where a file is missing, TypeError or RuntimeError where it does not fit."""
        policy = cls(PolicyConfig(**json.loads((folder / "config.json").read_text())))
        policy.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
        return policy.eval()

    def _layers(self) -> list[Block]:
        return cast("list[Block]", list(self.blocks))

    def _causal(self, ids_B_T: Tensor) -> tuple[Tensor, list[Tensor]]:
        T = ids_B_T.shape[1]
        x = self._embed(F.pad(ids_B_T, (self.window - 1, 0)))
        cache = []
        for block in self._layers():
            q, k, v = block.project(x, self.cos[:T], self.sin[:T])
            x = block.finish(x, F.scaled_dot_product_attention(q, k, v, is_causal=True))
            cache.append(torch.stack([k, v]))
        return x, cache

    def _embed(self, padded_B_T: Tensor) -> Tensor:
        own = self.embedding(padded_B_T)
        x = own[:, self.window - 1 :]
        for back, linear in enumerate(self.before, start=1):
            x = x + linear(own[:, self.window - 1 - back : -back])
        return x

    def _head(self, x: Tensor) -> Tensor:
        return F.linear(self.norm(x), self.embedding.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)
