"""A random model in Qwen3's shape, about a million parameters, over the small tokenizer; for engines that load models.

Run with the Python of an engine's environment, which has torch and transformers: tiny_model.py FOLDER SEED.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))
from tokenizer import CHATML, make_tokenizer

CONTEXT = 2048
# Bigger than a fresh model's, so that its distributions are not flat and a wrong logprob is far off.
SPREAD = 0.08


def main(folder: Path, seed: int) -> None:
    make_tokenizer(folder)
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), eos_token="<|im_end|>")
    tokenizer.pad_token, tokenizer.chat_template = "<|endoftext|>", CHATML
    tokenizer.save_pretrained(folder)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,  # vLLM on a CPU reloads all but a tied head
        initializer_range=SPREAD,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(folder)
    print(sum(parameter.numel() for parameter in model.parameters()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
